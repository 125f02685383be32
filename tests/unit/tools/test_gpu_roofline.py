"""Roofline on paper: known totals, and the launches of a decoder that counts its calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.choose import Parts
from baton.engine.runner.model.layers import unfused_layers
from baton.engine.runner.model.linear import TorchLinear
from baton.engine.runner.model.mixers import AttentionPass, Ends, ForwardPass
from baton.engine.runner.model.ops import MlpGate, Norm, Ops, Peaks
from baton.engine.runner.model.pass_layout import PassLayout
from baton.engine.runner.model.rope import Angles, Ropes
from baton.engine.runner.weights.decoder_loading import load_decoder
from baton.engine.runner.weights.tensor_loading import LoadTarget
from tests.support.random_folders import small_folder
from tools.gpu_roofline import (
    GPUS,
    STEPS,
    Row,
    fits,
    limit_s,
    make_rows,
    read_config,
    read_measured,
)
from tools.step_work import Kind, Step, Work, step_works

LLAMA, QWEN = "llama3.1-8b", "qwen3-0.6b"
LLAMA_PARAMETERS, QWEN_PARAMETERS = 8_030_261_248, 596_049_920  # as published
STEP = {step.name: step for step in STEPS}
CPU = torch.device("cpu")


def works(model: str, step: str, num_processors: int = 132) -> list[Work]:
    return list(step_works(read_config(model), STEP[step], num_processors))


def of_kernel(rows: Sequence[Row], kernel: str) -> Row:
    return next(row for row in rows if row.kernel == kernel)


def test_without_splits_one_kernel_reads_the_whole_context() -> None:
    split, whole = (
        make_rows(LLAMA, "h100-sxm", STEP["decode-1"], {}, splits=splits)
        for splits in (True, False)
    )

    assert of_kernel(split, "merge").launches == 32
    assert sum(row.launches for row in split) - sum(row.launches for row in whole) == 32
    products = [[row for row in rows if row.kind == Kind.PRODUCT.value] for rows in (split, whole)]
    assert products[0] == products[1]


@pytest.mark.parametrize("step", STEP)
def test_a_step_reads_each_weight_once(step: str) -> None:
    embedding = 128_256 * 4096

    llama, qwen = (sum(each.weight_bytes for each in works(model, step)) for model in (LLAMA, QWEN))

    assert llama == 2 * (LLAMA_PARAMETERS - embedding)
    assert qwen == 2 * QWEN_PARAMETERS  # the head is the embedding


@pytest.mark.parametrize(("step", "num_sequences"), [("decode-1", 1), ("decode-256", 256)])
def test_a_decode_reads_the_keys_and_values_of_its_contexts(step: str, num_sequences: int) -> None:
    kv_bytes = sum(each.kv_bytes for each in works(LLAMA, step))

    assert kv_bytes == num_sequences * 2048 * 32 * 2 * 8 * 128 * 2


def test_a_decode_multiplies_each_weight_once_per_sequence() -> None:
    flops = Counter[Kind]()
    for each in works(LLAMA, "decode-32"):
        flops[each.kind] += each.flops
    num_norms = 65 * 4096

    matrices = LLAMA_PARAMETERS - 128_256 * 4096 - num_norms
    assert flops[Kind.PRODUCT] == 2 * 32 * matrices
    assert flops[Kind.ATTENTION] == 32 * 32 * 4 * 2048 * 32 * 128
    assert flops[Kind.ELEMENTWISE] == 0


def test_a_prompt_attends_to_half_of_the_pairs_and_its_last_layer_to_those_of_one_token() -> None:
    flops = sum(each.flops for each in works(LLAMA, "prefill-2048") if each.kernel == "attention")

    pairs = 31 * 2048 * 2049 // 2 + 2048
    assert flops == pairs * 4 * 32 * 128


def test_the_limit_is_the_longer_of_memory_and_compute_time() -> None:
    work = Work("qkv", Kind.PRODUCT, weight_bytes=670_000_000, flops=10**9)

    assert limit_s(work, GPUS["h100-sxm"]) == pytest.approx(0.2e-3)
    assert limit_s(Work("qkv", Kind.PRODUCT, flops=989 * 10**9), GPUS["h100-sxm"]) == 1e-3


def test_a_single_sequence_is_split_over_its_context_and_many_are_not() -> None:
    merges = Counter(step for step in STEP for each in works(QWEN, step) if each.kernel == "merge")

    # The last layer of a prompt attends for one token.
    assert merges == {"decode-1": 28, "prefill-2048": 1}


def test_256_contexts_of_llama_do_not_fit_into_80_gb() -> None:
    assert fits(LLAMA, "h100-sxm", "decode-32")
    assert not fits(LLAMA, "h100-sxm", "decode-256")
    assert not fits(LLAMA, "l4", "decode-32")
    assert fits(QWEN, "l4", "decode-32")


def test_durations_of_a_run_are_put_beside_the_limits(tmp_path: Path) -> None:
    own = {"model": QWEN, "gpu": "l4", "step": "decode-1"}
    rows = [own | {"kernel": "qkv", "measured_s": 0.5}, own | {"kernel": "gate"}]
    (tmp_path / "run.json").write_text(json.dumps(rows))

    found = make_rows(QWEN, "l4", STEP["decode-1"], read_measured(tmp_path / "run.json"))

    assert of_kernel(found, "qkv").measured_s == 0.5
    assert of_kernel(found, "gate").measured_s is None


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="only dense models"):
        read_config("mixtral-8x7b")


# Kernels of the table by the call that launches them.
KERNELS = {
    "rms_norm": ("norm", "norm of outputs", "norm of heads"),
    "apply_rope": ("rope of keys", "rope of queries"),
    "apply_ropes": ("rope",),
    "apply_gate": ("gate",),
    "add": ("add",),
    "add_and_norm": ("add and norm",),
    "find_peaks": ("peaks",),
    "linear": ("qkv", "output", "gate and up", "down", "head"),
    "write": ("write",),
    "attend": ("attention",),
}


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "gemma3-1b", "smollm3-3b"])
@pytest.mark.parametrize("num_new", [1, 3])
def test_launches_are_those_that_a_decoder_makes(shape: str, num_new: int, tmp_path: Path) -> None:
    folder = small_folder(tmp_path, shape)
    counted = Counter[str]()
    run_decoder(folder, num_new, counted)

    # Enough tiles for a processor: attention is not split.
    step = Step("step", num_sequences=1, num_new=num_new, context_len=num_new)
    launches = Counter[str]()
    for each in step_works(read_config(str(folder)), step, num_processors=1):
        launches[each.kernel] += each.launches

    for call, kernels in KERNELS.items():
        assert counted[call] == sum(launches[kernel] for kernel in kernels), call


def run_decoder(folder: Path, num_tokens: int, counted: Counter[str]) -> None:
    """Compute a prompt, of which the last token is sampled, and count the calls."""
    checkpoint = SafetensorsFolder(folder)
    config, ops = read_model_config(checkpoint), CountingOps(counted)
    attention = CountingAttention(counted)
    parts = Parts("counting", ops, lambda kv, layers: attention, partial(unfused_layers, ops))
    with checkpoint.open_tensors() as tensors:
        decoder = load_decoder(config, tensors, LoadTarget(torch.float32, CPU, parts, "none"))
    positions = torch.arange(num_tokens)
    angles = Ropes(config, CPU, torch.float32).angles(positions, None, num_tokens)
    ends = Ends(positions[-1:], attention) if num_tokens > 1 else None
    with torch.inference_mode():
        hidden_states = decoder.forward(positions, ForwardPass(angles, attention), None, ends)
        decoder.ops.find_peaks(decoder.logits(hidden_states))


class CountingOps(Ops):
    """Operations of torch that count their calls."""

    def __init__(self, counted: Counter[str]) -> None:
        self._counted = counted
        self._ops = Ops()

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> CountingLinear:
        linear = self._ops.linear(weight, bias)
        assert isinstance(linear, TorchLinear)
        return CountingLinear(linear.weight, linear.bias, self._counted)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        self._counted["rms_norm"] += 1
        return self._ops.rms_norm(hidden_states, norm)

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        self._counted["apply_rope"] += 1
        return self._ops.apply_rope(heads, norm, angles)

    def apply_ropes(
        self, heads: tuple[Tensor, Tensor], norms: tuple[Norm | None, Norm | None], angles: Angles
    ) -> tuple[Tensor, Tensor]:
        self._counted["apply_ropes"] += 1
        return self._ops.apply_ropes(heads, norms, angles)

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        self._counted["apply_gate"] += 1
        return self._ops.apply_gate(gate_up, gate)

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        self._counted["add"] += 1
        return self._ops.add(hidden_states, output, scale)

    def add_and_norm(
        self, hidden_states: Tensor, output: Tensor, scale: float, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        self._counted["add_and_norm"] += 1
        return self._ops.add_and_norm(hidden_states, output, scale, norm)

    def find_peaks(self, logits: Tensor) -> Peaks:
        self._counted["find_peaks"] += 1
        return self._ops.find_peaks(logits)


@dataclass(frozen=True, slots=True)
class CountingLinear(TorchLinear):
    counted: Counter[str]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        self.counted["linear"] += 1
        return TorchLinear.__call__(self, hidden_states)


class CountingAttention:
    """Attention that returns its queries, and counts its calls."""

    def __init__(self, counted: Counter[str]) -> None:
        self._counted = counted

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        return self

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        self._counted["write"] += 1

    def attend(self, layer: int, query: Tensor) -> Tensor:
        self._counted["attend"] += 1
        return query
