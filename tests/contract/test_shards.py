"""Shards of a decoder: ranks that compute a part of each layer give what the whole one gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.weight_files import WeightFiles
from baton.core.errors import InvalidConfig
from baton.engine.runner.attention.kv_tensor import KvShape
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.choose import TORCH
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import ForwardPass
from baton.engine.runner.model.pass_layout import PassLayout
from baton.engine.runner.model.rank_group import RankGroup, Shard
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.weights.decoder_loading import attention_of, load_decoder
from baton.engine.runner.weights.shards import ShardedTensors, shard_config
from baton.engine.runner.weights.tensor_loading import LoadTarget
from tests.support.families import FAMILY_VARIANTS
from tests.support.models import VARIANTS, make_model_folder

CPU = torch.device("cpu")
TOKEN_IDS = torch.arange(5, 16)


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

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads = threads
        self.shard = Shard(rank, threads.size)

    @property
    def address(self) -> int:
        return 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.threads.exchange(self.shard.rank, tensor)).sum(dim=0)

    def multiply(self, part: Linear, hidden_states: Tensor, num_rows: int) -> Tensor:
        products = self.threads.exchange(self.shard.rank, part(hidden_states))
        return torch.cat(products, dim=1)[:, :num_rows]


def logits_of(folder: Path, group: RankGroup | None = None) -> Tensor:
    config = read_model_config(SafetensorsFolder(folder))
    vocab_size = config.vocab_size
    with WeightFiles(folder) as whole:
        files = whole if group is None else ShardedTensors.of(config, whole, group.shard)
        config = config if group is None else shard_config(config, group.shard)
        target = LoadTarget(torch.float32, CPU, TORCH, group=group, vocab_size=vocab_size)
        decoder, layers = load_decoder(config, files, target), attention_of(config, files, CPU)
    size, positions = len(TOKEN_IDS), np.arange(len(TOKEN_IDS))
    num_groups = len(config.kv_groups())
    layout = PassLayout(
        num_queries=np.array([size]),
        context_lens=np.array([size]),
        block_tables=np.arange(num_groups).reshape(num_groups, 1, 1),
        positions=positions,
        write_blocks=np.arange(num_groups)[:, None].repeat(size, 1),
        write_offsets=positions,
    )
    kv = KvShape.of(config, 16, torch.float32).allocate(num_groups, CPU)
    angles = Ropes(config, CPU, torch.float32).angles(torch.from_numpy(positions), None, size)
    forward_pass = ForwardPass(angles, TORCH.make_attention(kv, layers).begin(layout))
    with torch.inference_mode():
        return decoder.logits(decoder.forward(TOKEN_IDS, forward_pass, None))


def in_each_rank(num_ranks: int, compute: Callable[[RankGroup], Tensor]) -> list[Tensor]:
    threads = Threads(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(compute, [ThreadGroup(threads, rank) for rank in range(num_ranks)]))


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("llama", 2),
        ("llama", 4),  # two ranks share each KV head
        ("llama-mha-biased-sharded", 2),
        ("qwen3", 2),
        ("gemma3", 2),
        ("llama-tied-mqa", 2),
    ],
)
def test_ranks_together_compute_the_logits_of_the_whole_model(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    variant = {**VARIANTS, **FAMILY_VARIANTS}[name]
    folder = make_model_folder(tmp_path, replace(variant, dtype="float32"))

    found = in_each_rank(num_ranks, lambda group: logits_of(folder, group))

    expected = logits_of(folder)
    assert all(torch.allclose(each, expected, atol=1e-4, rtol=1e-4) for each in found)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("olmo2", "norms over all heads"), ("llama", "3")],
)
def test_a_model_that_cannot_be_divided_is_refused(name: str, fault: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, {**VARIANTS, **FAMILY_VARIANTS}[name])
    config = read_model_config(SafetensorsFolder(folder))

    with pytest.raises(InvalidConfig, match=fault):
        shard_config(config, Shard(0, 3))
