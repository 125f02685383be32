"""Shard of a decoder's weights: the heads, parts of MLPs and rows of the vocabulary of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.quantized import Quantized
from baton.checkpoint.weight_digests import FileIdentity
from baton.core.errors import InvalidConfig
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.weights.tensor_names import TensorMap, check_tensors


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the model as a rank computes it. Raises InvalidConfig if it cannot be divided."""
    undivided = {
        "experts": config.moe,
        "latent attention": config.latent,
        "recurrent layers": config.recurrent,
        "weights quantized in the folder": config.quantization,
        "inputs of each layer": config.per_layer,
        "layers of unlike heads": any(layer.kv_heads for layer in config.layers),
        "an output gate": config.has_output_gate,
        "a classifier": config.num_labels,
    }
    found = [name for name, has_it in undivided.items() if has_it]
    if found:
        raise InvalidConfig(
            f"{config.architecture}: models with {' and '.join(found)} cannot be divided among "
            "ranks yet: leave out --tensor-parallel-size"
        )
    size, kv_heads = shard.size, config.num_kv_heads
    mlp_sizes = {layer.mlp_size for layer in config.layers}
    if config.num_heads % size or kv_heads % min(size, kv_heads) or size % min(size, kv_heads):
        raise InvalidConfig(
            f"{config.num_heads} heads and {kv_heads} KV heads cannot be divided by "
            f"--tensor-parallel-size {size}"
        )
    if any(each % size for each in mlp_sizes):
        raise InvalidConfig(
            f"MLPs of {max(mlp_sizes)} numbers cannot be divided by --tensor-parallel-size {size}"
        )
    return replace(
        config,
        vocab_size=len(shard.rows_of(config.vocab_size)),
        num_heads=config.num_heads // size,
        num_kv_heads=len(shard.part_of(kv_heads)),
        layers=tuple(replace(layer, mlp_size=layer.mlp_size // size) for layer in config.layers),
    )


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """Implements `Tensors` of one rank: where its tensor is shorter, the part of the whole one."""

    whole: Tensors
    own_shapes: Mapping[str, Shape]
    shard: Shard
    vocabulary: Sequence[str]  # tensors that have a row for each token

    @classmethod
    def of(cls, config: ModelConfig, whole: Tensors, shard: Shard) -> ShardedTensors:
        """Check and divide the tensors of a model. Raises InvalidConfig if that is not possible."""
        check_tensors(config, whole)
        own = TensorMap(shard_config(config, shard), whole.shapes())
        if min(len(own.names.qkv), len(own.names.gate_up)) == 1:
            raise InvalidConfig(
                f"{config.architecture}: its stacked matrices cannot be divided among ranks yet: "
                "leave out --tensor-parallel-size"
            )
        vocabulary = [f"{name}.weight" for name in (own.embedding, own.head)]
        return cls(whole, own.shapes(), shard, vocabulary)

    def names(self) -> list[str]:
        return self.whole.names()

    def shapes(self) -> dict[str, Shape]:
        return {name: self.own_shapes.get(name, own) for name, own in self.whole.shapes().items()}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        """Do nothing: the whole tensors are checked."""

    def tensor(self, name: str) -> Tensor:
        tensor = self.whole.tensor(name)
        for axis, own in enumerate(self._own(name, tensor.shape)):
            tensor = tensor.narrow(axis, own.start, len(own))
        return tensor

    def part(self, name: str, index: int) -> Tensor:
        return self.tensor(name)[index]

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.tensor(name))

    def quantized(self, name: str, index: int | None = None) -> Sequence[Quantized] | None:
        parts = self.whole.quantized(name, index)
        if parts is None:
            return None
        num_rows = sum(len(part.numbers) for part in parts)
        rows, columns = self._own(name, (num_rows, parts[0].numbers.shape[1]))
        found, first = [], 0
        for part in parts:
            end = first + len(part.numbers)
            wanted = range(max(rows.start, first), min(rows.stop, end))
            if wanted:
                found.append(
                    _cut(name, part, range(wanted.start - first, wanted.stop - first), columns)
                )
            first = end
        return found

    def identities(self) -> Sequence[FileIdentity]:
        return self.whole.identities()

    def digest(self) -> str:
        """Return that of the whole tensors: all ranks have the same."""
        return self.whole.digest()

    def _own(self, name: str, shape: Sequence[int]) -> list[range]:
        """Return the own numbers of each axis of a tensor."""
        if name in self.vocabulary:
            return [self.shard.rows_of(shape[0]), range(shape[1])]
        own_shape = self.own_shapes.get(name, shape)
        return [_own_part(self.shard, own, of) for own, of in zip(own_shape, shape, strict=True)]


def _own_part(shard: Shard, own: int, count: int) -> range:
    """Return which `own` of so many numbers a rank has. With fewer parts, some share one."""
    [part] = shard.part_of(count // own)
    return range(part * own, (part + 1) * own)


def _cut(name: str, matrix: Quantized, rows: range, columns: range) -> Quantized:
    if len(rows) < len(matrix.numbers):
        matrix = matrix.rows(torch.tensor(rows))
    if len(columns) == matrix.numbers.shape[1]:
        return matrix
    cut = matrix.columns(torch.tensor(columns))
    if cut is None:
        raise InvalidConfig(
            f"{name}: the {matrix.group} columns of a scale would be divided among ranks; use a "
            "smaller --tensor-parallel-size, or weights in bfloat16"
        )
    return cut
