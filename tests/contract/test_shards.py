"""Shards of a decoder: ranks that compute a part of each layer give what the whole one gives."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.weight_files import WeightFiles
from baton.core.errors import InvalidConfig
from baton.engine.runner.attention.kv_tensor import KvShape
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import TORCH, Parts, native_parts
from baton.engine.runner.load import FAMILIES, LoadedDecoder
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.pass_layout import PassLayout
from baton.engine.runner.model.rank_group import RankGroup, Shard
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.ranks.links import RankLinks, links_bytes
from baton.engine.runner.ranks.sharded_source import sharded_source
from baton.engine.runner.weights.open_weights import OpenWeights
from baton.engine.runner.weights.shards import ShardedTensors, shard_config
from baton.engine.runner.weights.tensor_loading import LoadTarget
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder
from tests.support.packed_folders import EVERY_FORMAT, write_quantized

CPU = torch.device("cpu")
BLOCK_SIZE = 16
# Two passes over one sequence, each of its last token's hidden state: the first is a chunk.
PASSES = (torch.arange(5, 16), torch.arange(40, 43))
TOLERANCE = 1e-4  # sums of float32 in another order
EXPERTS = (
    ("qwen2-moe", 2),
    ("gpt-oss", 4),
    ("llama4", 2),
    ("glm4-moe", 2),
    ("minimax-m2", 4),
)
ALL_VARIANTS = {**VARIANTS, **FAMILY_VARIANTS, **RECURRENT}


class Computed(NamedTuple):
    logits: Tensor  # of each pass
    kv: Tensor


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[rank] = tensor
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()
        return found


class ThreadGroup:
    """Implements `RankGroup`."""

    def __init__(self, threads: Threads, shard: Shard) -> None:
        self.threads = threads
        self.shard = shard

    @property
    def address(self) -> int:
        return 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.threads.exchange(self.shard.rank, tensor)).sum(dim=0)

    def multiply(self, part: Linear, hidden_states: Tensor, num_rows: int) -> Tensor:
        products = self.threads.exchange(self.shard.rank, part(hidden_states))
        return torch.cat(products, dim=1)[:, :num_rows]


class LinkedGroup(RankLinks):
    """Implements `RankGroup` by the links of processes: native kernels can exchange, too."""

    def multiply(self, part: Linear, hidden_states: Tensor, num_rows: int) -> Tensor:
        products = part(hidden_states)
        gathered = torch.empty(self.shard.size, *products.shape, dtype=products.dtype)
        self.gather(products, gathered)
        return gathered.transpose(0, 1).flatten(1)


def in_one_process(folder: Path, parts: Parts = TORCH) -> Computed:
    config = read_model_config(SafetensorsFolder(folder))
    with WeightFiles(folder) as files:
        loaded = FAMILIES.load(open_weights(config, files, parts), None, None)
    return compute(config, loaded, parts, allocate(config, parts))


def in_ranks(folder: Path, num_ranks: int, *, has_whole_experts: bool = False) -> list[Computed]:
    """Return what each rank computes. The KV cache is that of all."""
    threads = Threads(num_ranks)
    shards = [Shard(rank, num_ranks, has_whole_experts) for rank in range(num_ranks)]
    groups = [ThreadGroup(threads, shard) for shard in shards]
    return in_groups(folder, groups, lambda: TORCH, threads.barrier.abort)


def in_native_ranks(
    folder: Path, num_ranks: int, *, has_whole_experts: bool = False
) -> list[Computed]:
    kernels = Kernels(next(iter(kernels_by_variant().values())).path, 1)
    memory = mmap.mmap(-1, links_bytes(kernels, num_ranks))
    shards = [Shard(rank, num_ranks, has_whole_experts) for rank in range(num_ranks)]
    groups = [LinkedGroup(kernels, memory, shard) for shard in shards]
    return in_groups(folder, groups, native_parts, lambda: groups[0].end(0))


def in_groups(
    folder: Path,
    groups: Sequence[RankGroup],
    make_parts: Callable[[], Parts],
    abort: Callable[[], None],
) -> list[Computed]:
    config = read_model_config(SafetensorsFolder(folder))
    kv = allocate(config, make_parts())

    def of_rank(group: RankGroup) -> Computed:
        try:
            parts = make_parts()
            with WeightFiles(folder) as files:
                source = sharded_source(group, lambda: None)
                loaded = source.load(open_weights(config, files, parts), None, None)
            return compute(config, loaded, parts, kv)
        except BaseException:
            abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(of_rank, groups))


def open_weights(config: ModelConfig, files: WeightFiles, parts: Parts) -> OpenWeights:
    return OpenWeights(files, LoadTarget(dtype_of(parts), CPU, parts), config, [])


def dtype_of(parts: Parts) -> torch.dtype:
    return torch.float32 if parts is TORCH else torch.bfloat16


def allocate(config: ModelConfig, parts: Parts) -> Tensor:
    shape = KvShape.of(config, BLOCK_SIZE, dtype_of(parts))
    return shape.allocate(len(config.kv_groups()), CPU)


def compute(config: ModelConfig, loaded: LoadedDecoder, parts: Parts, kv: Tensor) -> Computed:
    attention, logits, start = parts.make_attention(kv, loaded.attention), [], 0
    ropes = Ropes(config, CPU, kv.dtype)
    for token_ids in PASSES:
        layout = layout_of(start, len(token_ids), len(kv))
        start += len(token_ids)
        angles = ropes.angles(torch.from_numpy(layout.positions), None, start)
        last = np.zeros(1, dtype=np.int64)
        indices = torch.from_numpy(layout.last_token_indices(last))
        ends = Ends(indices, attention.begin(layout.restrict_to_last_tokens(last)))
        forward_pass = ForwardPass(angles, attention.begin(layout))
        with torch.inference_mode():
            hidden_states = loaded.decoder.forward(token_ids, forward_pass, None, ends)
            logits.append(loaded.decoder.logits(hidden_states))
    return Computed(torch.cat(logits), kv)


def layout_of(start: int, size: int, num_groups: int) -> PassLayout:
    positions, blocks = np.arange(start, start + size), np.arange(num_groups)
    return PassLayout(
        num_queries=np.array([size]),
        context_lens=np.array([start + size]),
        block_tables=blocks.reshape(num_groups, 1, 1),
        positions=positions,
        write_blocks=blocks[:, None].repeat(size, 1),
        write_offsets=positions,
    )


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("llama", 2),
        ("llama", 4),  # two ranks share each KV head
        ("llama-mha-biased-sharded", 2),
        ("qwen3", 2),
        ("gemma3", 2),
        ("llama-tied-mqa", 2),
        ("olmo2", 4),  # norms over all heads
        ("phi3", 4),  # stacked matrices
        # Experts with a gate of the shared ones, with biases, with stacked matrices, in groups.
        *EXPERTS,
        # Layers of unlike heads, with inputs of their own, and experts that are normed.
        ("gemma4", 2),
        ("gemma3n", 2),  # means of gates over all ranks
        ("gemma4-k-eq-v", 4),
        ("gemma4-moe", 2),
        # Latent attention.
        ("deepseek-v2-lite", 2),
        ("deepseek-v3", 4),
    ],
)
def test_ranks_together_compute_the_logits_of_the_whole_model(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="float32"))

    check_ranks(in_ranks(folder, num_ranks), in_one_process(folder))


@pytest.mark.parametrize(("name", "num_ranks"), EXPERTS)
def test_ranks_with_whole_experts_compute_the_logits_of_the_whole_model(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="float32"))

    check_ranks(in_ranks(folder, num_ranks, has_whole_experts=True), in_one_process(folder))


def check_ranks(found: Sequence[Computed], expected: Computed) -> None:
    for each in found:
        torch.testing.assert_close(each.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(each.kv, expected.kv, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(each.logits, found[0].logits)


@pytest.mark.parametrize(
    ("name", "written", "has_whole_experts"),
    [
        ("phi3", "gptq", False),
        ("qwen3-moe", "awq", False),
        ("llama", "packed-with-zeros", False),
        ("llama", "bytes", False),
        ("llama", "float8-blocks", False),
        ("qwen3-moe", "float8-rows", True),
        ("gpt-oss", "mxfp4", False),
        ("gpt-oss", "mxfp4", True),
    ],
)
def test_ranks_divide_quantized_weights(
    name: str, written: str, has_whole_experts: bool, tmp_path: Path
) -> None:
    folder = write_packed(name, written, tmp_path)

    found = in_ranks(folder, 2, has_whole_experts=has_whole_experts)

    check_ranks(found, in_one_process(folder))


def write_packed(name: str, written: str, folder: Path) -> Path:
    variant = ALL_VARIANTS[name]
    settings = {**variant.settings, "intermediate_size": 64}  # groups for two ranks
    plain = make_model_folder(folder / "source", replace(variant, settings=settings))
    packed, _ = write_quantized(plain, folder, EVERY_FORMAT[written])
    return packed


@pytest.mark.parametrize(
    ("name", "written", "num_ranks", "fault"),
    [
        ("llama", "gptq-8-bits", 4, "32 numbers that belong together"),
        ("llama", "fp8", 2, "24 numbers that belong together"),
        ("llama", "gptq-v2-ordered", 2, "in the order of activations"),
    ],
)
def test_groups_that_would_be_divided_are_refused(
    name: str, written: str, num_ranks: int, fault: str, tmp_path: Path
) -> None:
    folder = write_packed(name, written, tmp_path)
    config = read_model_config(SafetensorsFolder(folder))

    with WeightFiles(folder) as files, pytest.raises(InvalidConfig, match=fault):
        ShardedTensors.of(config, files, Shard(0, num_ranks))


@pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("name", "has_whole_experts"),
    [
        ("qwen3", False),
        ("olmo2", False),
        ("gpt-oss", False),
        ("qwen2-moe", True),
        ("gemma4", False),
        ("gemma3n", False),
        ("deepseek-v3", False),
    ],
)
def test_native_ranks_give_the_same_bits_in_each_run(
    name: str, has_whole_experts: bool, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, replace(ALL_VARIANTS[name], dtype="bfloat16"))

    first, second = (
        in_native_ranks(folder, 2, has_whole_experts=has_whole_experts) for _ in range(2)
    )

    expected = in_one_process(folder, native_parts())
    assert all(torch.equal(each.logits, first[0].logits) for each in (*first, *second))
    assert torch.equal(first[0].kv, second[0].kv)
    cosines = torch.cosine_similarity(first[0].logits, expected.logits)
    assert cosines.min() > 0.999


@pytest.mark.parametrize(
    ("name", "fault"), [("granite-4", "recurrent layers"), ("llama", "4 heads")]
)
def test_a_model_that_cannot_be_divided_is_refused(name: str, fault: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, ALL_VARIANTS[name])
    config = read_model_config(SafetensorsFolder(folder))

    with pytest.raises(InvalidConfig, match=fault):
        shard_config(config, Shard(0, 3))
