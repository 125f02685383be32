"""Greedy tokens of Triton kernels, under Triton's interpreter, equal those of torch in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.legs import LegKind
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.factory import build_scheduler
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.llm import LLM
from baton.node.options import NodeOptions
from baton.node.wiring import identify
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.gguf_files import write_gguf
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.packed_folders import EVERY_FORMAT, write_quantized
from tests.support.runner_drivers import Drive, Driver, drives_of
from tests.support.triton_parts import each_device, require_triton

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
# Median difference between two computations in bfloat16, in nats; see test_families.py.
HALF_TOLERANCE = 0.1
PROMPTS = ["import os\n", "class Queue:\n    def __init__(self):\n        self."]

LoadRunner = Callable[..., TorchRunner]


@pytest.fixture(autouse=True)
def _with_triton() -> None:
    require_triton()


def demo_tokens(kernels: str, num_tokens: int, kv_cache_dtype: str = "auto") -> list[list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with LLM(
        str(MODEL),
        dtype="float32",
        kernels=kernels,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory="16MiB",
    ) as llm:
        return [answer.token_ids for answer in llm.generate(PROMPTS, sampling)]


def family_tokens(runner: TorchRunner) -> list[list[int]]:
    prompts = [prompt_of(40), prompt_of(1)]
    return family_driver(runner, chunk=23).run(*drives_of(prompts, num_tokens=8))


def family_driver(runner: TorchRunner, chunk: int) -> Driver:
    blocks = runner.kv_memory.num_blocks
    return Driver(runner, num_blocks=blocks, block_size=16, chunk=chunk)


def prompt_logprobs(runner: TorchRunner) -> Tensor:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    drive = Drive(RequestId("r"), prompt_of(40), sampling=sampling, num_tokens=1)
    family_driver(runner, chunk=9).run(drive)
    return torch.tensor([each.logprob for each in drive.prompt_logprobs if each is not None])


def test_tokens_of_the_demo_model_equal_those_of_torch() -> None:
    assert demo_tokens("triton", num_tokens=3) == demo_tokens("torch", num_tokens=3)


@pytest.mark.triton
def test_longer_answers_of_the_demo_model_equal_those_of_torch() -> None:
    assert demo_tokens("triton", num_tokens=32) == demo_tokens("torch", num_tokens=32)


@pytest.mark.triton
def test_tokens_with_int8_kv_equal_those_of_torch() -> None:
    assert demo_tokens("triton", 8, "int8") == demo_tokens("torch", 8, "int8")


@pytest.mark.triton
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_tokens_of_weights_quantized_at_load_equal_those_of_torch(
    quantize: str, family_runner: LoadRunner
) -> None:
    settings = {"dtype": "float32", "quantize": quantize}
    runners = [family_runner("phi3", kernels=each, **settings) for each in ("triton", "torch")]

    found, wanted = map(family_tokens, runners)

    assert found == wanted


@each_device
@pytest.mark.parametrize("name", sorted(FAMILY_VARIANTS.keys() | RECURRENT))
def test_tokens_of_each_family_equal_those_of_torch_on_the_cpu(
    name: str, device: str, family_runner: LoadRunner
) -> None:
    triton = family_runner(name, dtype="float32", kernels="triton", device=device)
    torch_runner = family_runner(name, dtype="float32", kernels="torch")

    assert family_tokens(triton) == family_tokens(torch_runner)


@pytest.mark.triton
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "deepseek-v3", "granite-4-moe"])
def test_batch_invariant_tokens_equal_those_of_torch(name: str, family_runner: LoadRunner) -> None:
    invariant = family_runner(name, dtype="float32", kernels="triton", batch_invariant=True)
    torch_runner = family_runner(name, dtype="float32", kernels="torch")

    found, wanted = (
        family_driver(runner, chunk=5).run(*drives_of([prompt_of(8), prompt_of(1)], num_tokens=3))
        for runner in (invariant, torch_runner)
    )

    assert found == wanted


@pytest.mark.parametrize(
    ("kernels", "dtype", "has_other_bits"),
    [("triton", "float32", True), ("native", "bfloat16", False)],
)
def test_batch_invariant_nodes_hand_over_to_others_but_share_no_cached_blocks_of_other_bits(
    kernels: str, dtype: str, has_other_bits: bool, family_runner: LoadRunner
) -> None:
    both = [
        family_runner("gemma3", dtype=dtype, kernels=kernels, batch_invariant=batch_invariant)
        for batch_invariant in (False, True)
    ]
    options = NodeOptions(RunnerConfig("any"))
    fingerprints = {identify(options, LegKind.DECODE, runner).fingerprint for runner in both}
    plain, invariant = (
        build_scheduler(runner, EngineOptions()).cache_config.naming.names(prompt_of(40), 40)
        for runner in both
    )

    assert len(fingerprints) == 1
    assert len(plain) == len(invariant) == 2
    assert set(plain).isdisjoint(invariant) if has_other_bits else plain == invariant


@each_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3"])
def test_with_batch_invariance_logprobs_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    name: str, dtype: str, device: str, family_runner: LoadRunner
) -> None:
    settings = {"dtype": dtype, "kernels": "triton", "device": device}
    runner = family_runner(name, **settings, batch_invariant=True)
    sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2)

    def logprobs(chunk: int, *lengths: int) -> list[object]:
        drives = [
            Drive(RequestId(f"r{length}"), prompt_of(length), sampling, num_tokens=2)
            for length in lengths
        ]
        family_driver(runner, chunk).run(*drives)
        return [drives[0].prompt_logprobs, drives[0].logprobs]

    alone = logprobs(64, 9)

    assert logprobs(64, 9, 8, 1) == alone
    assert logprobs(4, 9) == alone


@pytest.mark.triton
@pytest.mark.parametrize(
    "name", ["gemma3", "gpt-oss", "deepseek-v3", "llama4", "qwen3-next", "granite-4-moe"]
)
def test_logprobs_in_bfloat16_are_close_to_those_of_torch(
    name: str, family_runner: LoadRunner
) -> None:
    runners = [family_runner(name, dtype="bfloat16", kernels=each) for each in ("triton", "torch")]

    found, wanted = map(prompt_logprobs, runners)

    assert len(found) == 39
    assert (found - wanted).abs().median() < HALF_TOLERANCE


QUANTIZED = [
    ("glm4", "gptq-v2-ordered"),
    ("qwen3-moe", "gptq-v2-ordered"),
    ("deepseek-v2-lite", "bytes"),
    ("gpt-oss", "mxfp4"),
    ("llama4-vision", "packed"),
]


@pytest.mark.triton
@pytest.mark.parametrize(("family", "written"), QUANTIZED)
def test_tokens_of_a_quantized_folder_equal_those_of_torch_on_its_dequantized_weights(
    family: str, written: str, family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    packed, plain = write_quantized(family_folder(family), tmp_path, EVERY_FORMAT[written])

    found, wanted = folder_tokens(packed, "triton"), folder_tokens(plain, "torch")

    assert found == wanted


@pytest.mark.triton
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_logprobs_of_gguf_files_in_bfloat16_are_close_to_those_of_torch(
    kind: str, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "llama", VARIANTS["llama"])
    file = write_gguf(folder, tmp_path / "model.gguf", kind).path

    found, wanted = (file_logprobs(file, each) for each in ("triton", "torch"))

    assert (found - wanted).abs().median() < HALF_TOLERANCE


def folder_tokens(folder: Path, kernels: str) -> list[list[int]]:
    settings = RunnerConfig(str(folder), dtype="float32", kernels=kernels, kv_cache_bytes=4 << 20)
    with load_runner(settings) as runner:
        drives = drives_of([prompt_of(20), prompt_of(1)], num_tokens=4)
        return family_driver(runner, chunk=18).run(*drives)


def file_logprobs(file: Path, kernels: str) -> Tensor:
    settings = RunnerConfig(str(file), dtype="bfloat16", kernels=kernels, kv_cache_bytes=4 << 20)
    with load_runner(settings) as runner:
        return prompt_logprobs(runner)
