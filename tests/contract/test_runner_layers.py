"""Fused layer call of the native kernels: same bits as the kernels called one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.checkpoint.peft_folder import PeftFolder
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.weight_files import WeightFiles
from baton.engine.runner.adapters.adapted_layers import adaptable_layers
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.attention.kv_tensor import KvShape
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import TORCH, Parts, native_parts
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.kernels.native_attention import NativePagedAttention
from baton.engine.runner.kernels.native_layers import FusedLayer, native_layers
from baton.engine.runner.model.adapters import Group
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer, join_layers, unfused_layers
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.pass_layout import PassLayout
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.weights.decoder_loading import attention_of, load_decoder
from baton.engine.runner.weights.tensor_loading import LoadTarget
from tests.support.adapters import write_adapter
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder

pytestmark = [
    pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here"),
    pytest.mark.usefixtures("one_thread"),  # of torch; the kernels have two
]

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 32
# Tokens computed before and in this pass, by sequence: single tokens first.
PASSES = (((0, 20), (0, 33)), ((20, 1), (33, 1)), ((21, 1), (0, 70)), ((22, 1), (70, 5)))
# Sequences whose last state is requested, by pass: none for a chunk inside of a prompt.
SAMPLED = ((0, 1), (), (1,), (0, 1))
# Each has a part that others lack: biases, query and key norms, windows, quantization.
MODELS = (
    ("llama-tied-mqa", "none"),
    ("llama-mha-biased-sharded", "none"),
    ("mistral-window", "none"),
    ("qwen2-window", "none"),
    ("qwen3-untied-biased", "none"),
    ("qwen3", "int8"),
    ("llama", "int4"),
)
# Norms before, after and around attention and MLP, norms over all heads, several RoPEs, other
# gates, scaled outputs, sinks, chunks, and experts.
FAMILIES = (
    "gemma3",
    "gemma4",
    "gemma4-k-eq-v",
    "hunyuan",
    "olmo2",
    "glm4",
    "granite",
    "smollm3",
    "gpt-oss",
    "llama4",
)
ALL_VARIANTS = {**VARIANTS, **FAMILY_VARIANTS}


def part_by_part(parts: Parts) -> Parts:
    return replace(parts, make_layers=partial(unfused_layers, parts.ops))


def recording(parts: Parts) -> tuple[Parts, list[Sequence[DecoderLayer]]]:
    """Return the parts, and a list of the layers that they make."""
    made: list[Sequence[DecoderLayer]] = []

    def make_layers(config: ModelConfig, layers: Sequence[Layer]) -> Sequence[DecoderLayer]:
        made.append(parts.make_layers(config, layers))
        return made[-1]

    return replace(parts, make_layers=make_layers), made


def passes_through(
    folder: Path,
    parts: Parts,
    quantize: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    are_ends_alone: bool = False,
    adapters: Sequence[Path] = (),  # of the first sequences
) -> list[Tensor]:
    """Return the states after each pass, of all or of the last tokens, followed by the cache."""
    config = read_model_config(SafetensorsFolder(folder))
    active = ActiveAdapters(parts.low_rank)
    table = AdapterTable(active, config, dtype, CPU, max_rank=8, max_loras=2, num_places=2)
    loaded = [table.load(PeftFolder(each)) for each in adapters]
    with WeightFiles(folder) as files:
        target = LoadTarget(dtype, CPU, parts, quantize)
        adapt = partial(adaptable_layers, parts.ops, active) if loaded else None
        decoder = load_decoder(config, files, target, None, adapt)
        attention_layers = attention_of(config, files, CPU)
    groups = config.kv_groups()
    kv = KvShape.of(config, BLOCK_SIZE, dtype).allocate(len(groups) * NUM_BLOCKS, CPU)
    attention = parts.make_attention(kv, attention_layers)
    ropes = Ropes(config, CPU, kv.dtype)
    generator = torch.Generator().manual_seed(1)
    found = []
    for sequences, sampled in zip(PASSES, SAMPLED, strict=True):
        layout = layout_of(sequences, len(groups))
        token_ids = torch.randint(config.vocab_size, layout.positions.shape, generator=generator)
        angles = ropes.angles(
            torch.from_numpy(layout.positions), None, int(layout.positions.max()) + 1
        )
        ends = None
        if are_ends_alone:
            of_ends = np.array(sampled, dtype=np.int64)
            indices = torch.from_numpy(layout.last_token_indices(of_ends))
            ends = Ends(indices, attention.begin(layout.restrict_to_last_tokens(of_ends)))
        tokens = torch.arange(len(token_ids)).split([now for _, now in sequences])
        adapted = [Group(*each) for each in zip(loaded, tokens, strict=False)]
        forward_pass = ForwardPass(angles, attention.begin(layout), groups=adapted)
        found.append(decoder.forward(token_ids, forward_pass, None, ends))
    return [*found, kv]


def layout_of(sequences: Sequence[tuple[int, int]], num_groups: int = 1) -> PassLayout:
    """Return the layout of sequences with ten blocks in each KV group, in order."""
    places = [
        (which, position)
        for which, (had, now) in enumerate(sequences)
        for position in range(had, had + now)
    ]
    tables = np.arange(num_groups * len(sequences) * 10).reshape(num_groups, -1, 10)
    positions = np.array([position for _, position in places])
    return PassLayout(
        num_queries=np.array([now for _, now in sequences]),
        context_lens=np.array([had + now for had, now in sequences]),
        block_tables=tables,
        positions=positions,
        write_blocks=np.array([tables[:, which, at // BLOCK_SIZE] for which, at in places]).T,
        write_offsets=positions % BLOCK_SIZE,
    )


@pytest.mark.parametrize("num_adapters", [1, 2])
@pytest.mark.parametrize("are_ends_alone", [False, True])
@pytest.mark.parametrize(
    ("name", "quantize"), [("qwen3", "int8"), ("gemma3", "none"), ("glm4", "none")]
)
def test_a_fused_layer_with_adapters_is_bitwise_equal_to_its_parts(
    name: str, quantize: str, are_ends_alone: bool, num_adapters: int, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="bfloat16"))
    adapters = [
        write_adapter(folder, tmp_path / str(seed), seed=seed, rank=5 + seed, scale=0.05)
        for seed in range(num_adapters)
    ]
    parts, made = recording(native_parts())
    run = partial(passes_through, folder, quantize=quantize, are_ends_alone=are_ends_alone)

    whole = run(parts, adapters=adapters)
    apart = run(part_by_part(parts), adapters=adapters)

    assert all(isinstance(layer, FusedLayer) for layer in made[0])
    assert all(torch.equal(*both) for both in zip(whole, apart, strict=True))
    plain = run(parts)
    assert not torch.equal(whole[-1], plain[-1])
    if num_adapters == 1 and not are_ends_alone:  # the second sequence has the same bits
        assert torch.equal(whole[0][20:], plain[0][20:])


@pytest.mark.parametrize(("name", "quantize"), [*MODELS, *((name, "none") for name in FAMILIES)])
def test_a_fused_layer_is_bitwise_equal_to_its_parts(
    name: str, quantize: str, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="bfloat16"))
    parts, made = recording(native_parts())

    whole = passes_through(folder, parts, quantize)
    apart = passes_through(folder, part_by_part(parts), quantize)

    assert all(isinstance(layer, FusedLayer) for layer in made[0])
    assert all(map(torch.equal, whole, apart))


@pytest.mark.parametrize(
    ("name", "num_layers", "num_joined"),
    # Four layers; two KV groups; the last three of seven layers write nothing.
    [("smollm3", 4, 2), ("olmo3", 4, 2), ("gemma4", 7, 3)],
)
def test_joined_layers_are_bitwise_equal_to_single_ones(
    name: str, num_layers: int, num_joined: int, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="bfloat16"))
    parts, made = recording(native_parts())

    joined = passes_through(folder, parts, "none")
    apart = passes_through(folder, part_by_part(parts), "none")

    joined_layers, place = join_layers(made[0], alone=3)
    assert (len(made[0]), len(joined_layers), place) == (num_layers, num_joined, 1)
    assert all(map(torch.equal, joined, apart))


@pytest.mark.parametrize("kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys())
def test_every_build_supports_fused_layers(kernels: Kernels, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, VARIANTS["qwen3-bf16"])
    parts = Parts(
        "this build",
        NativeOps(kernels),
        partial(NativePagedAttention, kernels),
        partial(native_layers, kernels),
    )
    parts, made = recording(parts)

    whole = passes_through(folder, parts, "none")
    apart = passes_through(folder, part_by_part(parts), "none")

    assert all(isinstance(layer, FusedLayer) for layer in made[0])
    assert all(map(torch.equal, whole, apart))


@pytest.mark.parametrize("name", ["granite-4-moe", "nemotron-h", "nemotron-3"])
def test_a_model_with_recurrent_layers_has_fused_attention_layers(
    name: str, tmp_path: Path
) -> None:
    """Its tokens are those of the reference: tests/golden/test_state_families.py."""
    variant = replace(RECURRENT[name], dtype="bfloat16")
    folder = make_model_folder(tmp_path, variant)
    config = read_model_config(SafetensorsFolder(folder))
    parts, made = recording(native_parts())

    with WeightFiles(folder) as files:
        load_decoder(config, files, LoadTarget(torch.bfloat16, CPU, parts))

    fused = [index for index, layer in enumerate(made[0]) if isinstance(layer, FusedLayer)]
    assert tuple(fused) == config.attention_layers


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """The smallest low-rank adapter: one for all tokens."""

    base: Linear
    down: Tensor  # [rank, columns]
    up: Tensor  # [rows, rank]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.base(hidden_states) + hidden_states @ self.down.T @ self.up.T

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.base.rows(row_ids) + self.up[row_ids] @ self.down


def adapted(parts: Parts, scale: float) -> Parts:
    """Return parts that adapt the attention of the first layer."""

    def make_layers(config: ModelConfig, layers: Sequence[Layer]) -> Sequence[DecoderLayer]:
        first, hidden_size = layers[0], config.hidden_size
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        down, up = torch.ones(2, hidden_size), scale * torch.ones(num_rows, 2)
        qkv = AdaptedLinear(first.qkv, down.bfloat16(), up.bfloat16())
        return parts.make_layers(config, [replace(first, qkv=qkv), *layers[1:]])

    return replace(parts, make_layers=make_layers)


def test_an_adapted_linear_disables_fusion_of_its_own_layer_only(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, VARIANTS["qwen3-bf16"])
    parts, made = recording(native_parts())

    plain = passes_through(folder, native_parts(), "none")
    adapted_by_zero = passes_through(folder, adapted(parts, 0.0), "none")
    adapted_by_more = passes_through(folder, adapted(parts, 0.1), "none")

    assert [isinstance(layer, FusedLayer) for layer in made[0]] == [False, True]
    assert all(map(torch.equal, plain, adapted_by_zero))
    assert not torch.equal(plain[0], adapted_by_more[0])


def at_ends(passed: Sequence[Tensor]) -> list[Tensor]:
    """Select the requested tokens from the states of all tokens."""
    *states, kv = passed
    last = [layout_of(sequences).last_token_indices(np.arange(2)) for sequences in PASSES]
    picked = [
        one[places[list(sampled)]]
        for one, places, sampled in zip(states, last, SAMPLED, strict=True)
    ]
    return [*picked, kv]


@pytest.mark.parametrize(("name", "quantize"), [*MODELS, ("olmo2", "none"), ("gemma3", "none")])
def test_the_last_tokens_alone_are_bitwise_equal_to_those_among_all(
    name: str, quantize: str, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="bfloat16"))
    parts = native_parts()

    alone = passes_through(folder, parts, quantize, are_ends_alone=True)
    among_all = at_ends(passes_through(folder, parts, quantize))

    assert all(map(torch.equal, alone, among_all))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_in_torch_the_last_tokens_alone_equal_those_among_all(name: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, VARIANTS[name])
    alone = passes_through(folder, TORCH, "none", torch.float32, are_ends_alone=True)
    among_all = at_ends(passes_through(folder, TORCH, "none", torch.float32))

    for one, other in zip(alone, among_all, strict=True):
        torch.testing.assert_close(one, other)
