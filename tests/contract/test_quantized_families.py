"""Quantized folders of families with experts, fused matrices and permuted heads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.weight_files import WeightFiles
from baton.core.errors import ModelError
from baton.core.sampling import SamplingParams
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.choose import Parts, native_parts
from baton.engine.runner.kernels.native_linear import NativeLinear
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import Moe
from baton.engine.runner.model_info import LoadProgress
from baton.engine.runner.weights.decoder_loading import load_decoder
from baton.engine.runner.weights.tensor_loading import LoadTarget
from baton.llm import LLM
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.packed_folders import (
    COMBINATIONS,
    EVERY_FORMAT,
    FORMATS,
    MXFP4,
    Format,
    write_quantized,
)
from tests.support.runner_drivers import Driver, RandomChunkDriver, drives_of
from tests.support.triton_parts import interpreted_parts, require_triton

CPU = torch.device("cpu")
BUDGET = 1 << 20
STACKED = ("llama4-vision", "qwen3-vl-moe")  # quantized folders store each expert on its own
needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
each_combination = pytest.mark.parametrize(("family", "written"), COMBINATIONS)

Write = Callable[[str, Format], tuple[Path, Path]]


@pytest.fixture(scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            variant = {**VARIANTS, **FAMILY_VARIANTS, **RECURRENT}[name]
            made[name] = make_model_folder(tmp_path_factory.mktemp(name), variant)
        return made[name]

    return make


@pytest.fixture
def write(make_family: Callable[[str], Path], tmp_path: Path) -> Write:
    """Write a quantized folder of a family, and its dequantized twin."""
    return lambda family, written: write_quantized(make_family(family), tmp_path, written)


def logprobs_of(model: Path, **settings: Any) -> Tensor:
    with LLM(str(model), kv_cache_memory="16MiB", **settings) as llm:
        [answer] = llm.generate(prompt_of(60), SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    return torch.tensor([one.logprob for one in answer.prompt_logprobs if one is not None])


def respell(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@each_combination
def test_a_quantized_family_generates_the_tokens_of_its_dequantized_weights(
    family: str, written: str, make_family: Callable[[str], Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(make_family(family), tmp_path / "source"))
    if family in STACKED:
        respell(source, separate_experts)
    packed, plain = write_quantized(source, tmp_path, EVERY_FORMAT[written])

    found, wanted = (logprobs_of(each, dtype="float32") for each in (packed, plain))

    assert len(wanted) == 59
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("written", "tolerance"), [("gptq", 5e-3), ("float8-rows", 0.0)])
def test_row_scales_multiply_quantized_matrices(
    written: str, tolerance: float, write: Write
) -> None:
    packed, plain = write("falcon-h1", EVERY_FORMAT[written])

    found, wanted = (logprobs_of(each, dtype="float32") for each in (packed, plain))

    # The products with the scales of GPTQ are rounded to float16.
    assert (found - wanted).abs().median() <= tolerance


@needs_kernels
@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("glm4", "fp8"),
        ("qwen3-moe", "awq"),
        ("gpt-oss", "mxfp4"),
        ("deepseek-v2-lite", "bytes"),
    ],
)
def test_native_kernels_support_quantized_families(family: str, written: str, write: Write) -> None:
    packed, plain = write(family, EVERY_FORMAT[written])

    found = logprobs_of(packed, kernels="native", activation_dtype="bfloat16")
    wanted = logprobs_of(plain, dtype="float32")

    # A token close to the edge between two experts can go to another one.
    assert (found - wanted).abs().median() < 0.05


@needs_kernels
def test_mxfp4_stays_packed_with_native_kernels(write: Write) -> None:
    for linear in experts_of(write("gpt-oss", MXFP4)[0], native_parts()):
        assert isinstance(linear, NativeLinear)
        assert (linear.matrix.bits, linear.matrix.is_mxfp4) == (4, 1)


def test_mxfp4_stays_packed_with_triton_kernels(write: Write) -> None:
    require_triton()

    for linear in experts_of(write("gpt-oss", MXFP4)[0], interpreted_parts()):
        layout = linear.layout
        num_numbers = layout.padded_rows * layout.num_pieces * layout.piece
        assert (layout.bits, layout.kind) == (4, "mxfp4")
        assert linear.packed.nbytes == 4.5 / 8 * num_numbers


def experts_of(packed: Path, parts: Parts) -> list[Any]:
    """Load a model and return the matrices of its experts."""
    loaded = list[Layer]()

    def make_layers(config: ModelConfig, layers: Sequence[Layer]) -> Sequence[DecoderLayer]:
        loaded.extend(layers)
        return parts.make_layers(config, layers)

    target = LoadTarget(torch.bfloat16, CPU, replace(parts, make_layers=make_layers))
    with WeightFiles(packed) as files:
        load_decoder(read_model_config(SafetensorsFolder(packed)), files, target)

    experts = [expert for layer in loaded for expert in cast("Moe", layer.mlp).experts]
    return [linear for expert in experts for linear in (expert.gate_up, expert.down)]


@needs_kernels
def test_mxfp4_tokens_are_the_same_for_any_chunks_and_any_batch(write: Write) -> None:
    packed, _ = write("gpt-oss", MXFP4)
    settings = RunnerConfig(str(packed), kernels="native", kv_cache_bytes=4 * BUDGET)
    lengths, sampling = (1, 17, 65, 90), SamplingParams(temperature=0.9, logprobs=3)

    with load_runner(settings) as runner:
        shape = {"num_blocks": runner.kv_memory.num_blocks, "block_size": 16}
        alone, together = (
            drives_of([prompt_of(length) for length in lengths], sampling=sampling, num_tokens=24)
            for _ in range(2)
        )
        for drive in alone:
            Driver(runner, **shape).run(drive)
        RandomChunkDriver(runner, **shape, seed=1).run(*together)

    for one, other in zip(alone, together, strict=True):
        assert one.outputs == other.outputs
        assert one.logprobs == other.logprobs


@pytest.mark.parametrize("family", ["granite-moe", "phi3"])
def test_loaded_weights_do_not_change_with_their_files(
    family: str, make_family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_family(family), tmp_path / "changed"))
    settings = RunnerConfig(str(folder), kernels="torch", kv_cache_bytes=BUDGET)
    outputs = []

    for changes in (False, True):
        drive = drives_of([prompt_of(20)], num_tokens=8)[0]
        with load_runner(settings) as runner:
            if changes:
                with (folder / "model.safetensors").open("r+b") as file:
                    file.seek(-(1 << 16), 2)
                    file.write(bytes(1 << 16))
            blocks = runner.kv_memory.num_blocks
            Driver(runner, num_blocks=blocks, block_size=16).run(drive)
        outputs.append((drive.outputs, drive.logprobs))

    assert outputs[0] == outputs[1]


@needs_kernels
def test_fp8_folders_are_quantized_like_unquantized_ones(write: Write) -> None:
    folders = write("qwen3-moe", FORMATS["fp8"])

    found, wanted = (
        logprobs_of(each, kernels="native", dtype="bfloat16", quantize="int8") for each in folders
    )

    assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", ["gpt-oss", "llama4", "qwen3-vl-moe"])
def test_stacked_experts_can_be_stored_one_by_one(
    family: str, make_family: Callable[[str], Path], tmp_path: Path
) -> None:
    source = make_family(family)
    separate = Path(shutil.copytree(source, tmp_path / "separate"))
    respell(separate, separate_experts)
    packed, plain = write_quantized(separate, tmp_path, FORMATS["packed"])

    stacked, alone = (logprobs_of(each, dtype="float32") for each in (source, separate))
    found, wanted = (logprobs_of(each, dtype="float32") for each in (packed, plain))

    assert torch.allclose(alone, stacked, atol=1e-5)
    assert torch.equal(found, wanted)


def separate_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        stacked = tensors.pop(name)
        prefix, part = name.rsplit(".", 1)
        suffix = "bias" if part.endswith("_bias") else "weight"
        is_qwen3_vl = ".language_model." in name and ".mlp." in name
        is_interleaved = ".mlp." in name and not is_qwen3_vl  # that of gpt-oss
        for index, stored in enumerate(stacked):
            rows = stored if suffix == "bias" or is_qwen3_vl else stored.T
            parts = {"down": rows}
            if part.startswith("gate_up"):
                halves = (rows[::2], rows[1::2]) if is_interleaved else rows.chunk(2)
                parts = dict(zip(("gate", "up"), halves, strict=True))
            for which, matrix in parts.items():
                tensors[f"{prefix}.{index}.{which}_proj.{suffix}"] = matrix.contiguous()


def test_stacked_experts_of_qwen3_vl_can_be_stored_transposed(
    make_family: Callable[[str], Path], tmp_path: Path
) -> None:
    source = make_family("qwen3-vl-moe")
    published = Path(shutil.copytree(source, tmp_path / "published"))
    respell(published, transpose_experts)

    found, wanted = (logprobs_of(each, dtype="float32") for each in (published, source))

    assert torch.equal(found, wanted)


def transpose_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()


def test_a_quantized_router_is_dequantized(write: Write) -> None:
    linears = r".*(_proj|mlp\.gate)\.weight"
    packed, plain = write("qwen3-moe", replace(FORMATS["packed-with-zeros"], linears=linears))

    assert torch.equal(*(logprobs_of(each, dtype="float32") for each in (packed, plain)))


def test_modules_excluded_from_quantization_are_loaded_unchanged(write: Write) -> None:
    linears = r".*mlp\.experts.*_proj\.weight"
    packed, plain = write("qwen3-moe", replace(FORMATS["gptq"], linears=linears))

    assert torch.equal(*(logprobs_of(each, dtype="float32") for each in (packed, plain)))


@pytest.mark.parametrize(
    ("family", "written", "linears", "named"),
    [
        ("mixtral", "gptq", r".*q_proj\.weight", "q_proj.*k_proj.*some are quantized"),
        ("gpt-oss", "awq", r".*self_attn\.(q|k)_proj\.weight", "some are quantized"),
        ("granite-moe", "bytes", r".*q_proj\.weight", "some are quantized"),
    ],
)
def test_a_partly_quantized_layer_is_refused_by_name(
    family: str, written: str, linears: str, named: str, write: Write
) -> None:
    packed, _ = write(family, replace(FORMATS[written], linears=linears))

    with pytest.raises(ModelError, match=named):
        load_runner(RunnerConfig(str(packed), kv_cache_bytes=BUDGET))


def stack_scales(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors[f"{name}_scale"] = torch.ones(4)


def pack_queries(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}_blocks"] = torch.zeros(2, 2, dtype=torch.uint8)
    del tensors[f"{name}.weight"]


@pytest.mark.parametrize(
    ("family", "config", "change", "named"),
    [
        ("granite-moe", FORMATS["float8-rows"].config, stack_scales, "input_linear.*not supported"),
        ("gpt-oss", MXFP4.config, pack_queries, "q_proj.weight of mxfp4 is not supported"),
    ],
)
def test_an_unsupported_format_of_a_family_is_refused_by_name(
    family: str,
    config: Mapping[str, Any],
    change: Callable[[dict[str, Tensor]], None],
    named: str,
    make_family: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(make_family(family), tmp_path / "changed"))
    respell(folder, change)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": dict(config)}))

    with pytest.raises(ModelError, match=named):
        load_runner(RunnerConfig(str(folder), kv_cache_bytes=BUDGET))


def progress_of(folder: Path, **settings: Any) -> list[LoadProgress]:
    seen: list[LoadProgress] = []
    load_runner(RunnerConfig(str(folder), kv_cache_bytes=4 * BUDGET, **settings), seen.append)
    return seen


def check_progress(seen: list[LoadProgress], *, num_numbers: int) -> None:
    loaded = [each.loaded_bytes for each in seen]
    assert loaded == sorted(loaded)
    assert loaded[-1] == seen[-1].total_bytes == 4 * num_numbers


@pytest.mark.parametrize("family", FAMILY_VARIANTS)
def test_load_progress_of_each_family_ends_at_100_percent(
    family: str, make_family: Callable[[str], Path]
) -> None:
    folder = make_family(family)
    tensors = load_file(folder / "model.safetensors")
    sizes = {
        name: tensor.numel()
        for name, tensor in tensors.items()
        if not re.search(r"sinks$|vis(ion|ual)|projector", name)
    }

    check_progress(progress_of(folder), num_numbers=sum(sizes.values()))


@pytest.mark.parametrize(("family", "written"), [("qwen3-moe", "fp8"), ("gpt-oss", "mxfp4")])
def test_load_progress_of_quantized_folders_ends_at_100_percent(
    family: str, written: str, write: Write
) -> None:
    packed, plain = write(family, EVERY_FORMAT[written])
    tensors = load_file(plain / "model.safetensors")
    sizes = [tensor.numel() for name, tensor in tensors.items() if not name.endswith("sinks")]

    check_progress(progress_of(packed, dtype="float32"), num_numbers=sum(sizes))
