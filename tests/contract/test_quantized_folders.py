"""Prequantized model folders, and weights that are quantized while loading."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidConfig, ModelError
from baton.core.sampling import SamplingParams
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.llm import LLM
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.packed_folders import FORMATS, write_quantized

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SOURCES = DEMO.parents[1] / "router"
PERPLEXITY_BOUND = 1.01

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("llama"), VARIANTS["llama"])


def logprobs_of(model: Path, *prompts: tuple[int, ...], **settings: Any) -> torch.Tensor:
    """Return the logprob of each token but the first, given the tokens before it."""
    with LLM(str(model), kv_cache_memory="16MiB", **settings) as llm:
        answers = llm.generate(list(prompts), SamplingParams(max_tokens=1, prompt_logprobs=0))
    reported = [one for answer in answers for one in answer.prompt_logprobs or ()]
    return torch.tensor([one.logprob for one in reported if one is not None])


@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS.keys())
def test_a_quantized_folder_generates_the_tokens_of_its_dequantized_weights(
    source: Path, tmp_path: Path, written: Any
) -> None:
    packed, plain = write_quantized(source, tmp_path, written)
    prompt = prompt_of(60)

    found, wanted = (logprobs_of(each, prompt, dtype="float32") for each in (packed, plain))

    assert len(wanted) == 59
    assert torch.equal(found, wanted)


@needs_kernels
@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS.keys())
def test_native_kernels_support_quantized_folders(
    source: Path, tmp_path: Path, written: Any
) -> None:
    packed, plain = write_quantized(source, tmp_path, written)
    prompt = prompt_of(60)

    found = logprobs_of(packed, prompt, kernels="native")

    assert (found - logprobs_of(plain, prompt, dtype="float32")).abs().mean() < 0.05


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method.*bitsandbytes"),
        ({"quant_method": None}, "quant_method.*missing"),
        ({"bits": 3}, "bits.*3"),
        ({"group_size": 12}, "group_size.*12"),
        ({"group_size": None}, "group_size.*missing"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format.*marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "version.*gemv"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic.*down"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size.*128"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format.*nvfp4"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "config_groups.*missing",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"type": "float"}}},
            },
            "type.*float",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "group_0": {"weights": {"type": "float", "num_bits": 4, "strategy": "group"}}
                },
            },
            "num_bits.*4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    f"group_{bits}": {"weights": {"type": "int", "num_bits": bits}}
                    for bits in (4, 8)
                },
            },
            "config_groups.*same weights",
        ),
    ],
    ids=str,
)
def test_an_unknown_quantization_is_named(
    source: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    packed, _ = write_quantized(source, tmp_path, FORMATS["gptq"])
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= change
    (packed / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=f"quantization_config.*{named}"):
        load_runner(RunnerConfig(str(packed), kv_cache_bytes=1 << 20))


def test_an_unknown_quantize_option_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="quantize 'int3'"):
        RunnerConfig(str(DEMO), quantize="int3")


def test_nodes_with_different_quantization_do_not_share_kv(source: Path) -> None:
    fingerprints = set()
    for quantize in ("none", "int8", "int4"):
        config = RunnerConfig(str(source), kv_cache_bytes=1 << 20, quantize=quantize)
        with load_runner(config) as runner:
            fingerprints.add(runner.info.fingerprint)

    assert len(fingerprints) == 3


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantization_hardly_changes_the_loss_of_the_demo_model(
    kernels: str, quantize: str
) -> None:
    found = logprobs_of(
        DEMO, *source_prompts(), kernels=kernels, dtype="bfloat16", quantize=quantize
    )

    lost = plain_logprobs() - found
    assert len(lost) == 2 * 999
    # Perplexity, relative to that of the model as it is.
    assert math.exp(lost.mean()) < PERPLEXITY_BOUND


@cache
def plain_logprobs() -> torch.Tensor:
    return logprobs_of(DEMO, *source_prompts(), kernels="torch", dtype="bfloat16")


def source_prompts() -> list[tuple[int, ...]]:
    text = "".join(path.read_text() for path in sorted(SOURCES.glob("*.py")))
    tokens = load_tokenizer(DEMO).encode(text)
    return [tuple(tokens[first : first + 1000]) for first in range(0, 2000, 1000)]
