"""Shard of a decoder's weights: the heads, parts of MLPs and rows of the vocabulary of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.quantized import Quantized
from baton.checkpoint.weight_digests import FileIdentity
from baton.core.errors import InvalidConfig
from baton.engine.runner.model.config import LayerConfig, ModelConfig, MoeConfig
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.weights.decoder_weights import check_tensors, record, stored_parts
from baton.engine.runner.weights.packed import PartAxis
from baton.engine.runner.weights.tensor_names import TensorMap


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the model as a rank computes it. Raises InvalidConfig if it cannot be divided."""
    undivided = {"recurrent layers": config.recurrent, "a classifier": config.num_labels}
    found = [name for name, has_it in undivided.items() if has_it]
    if found:
        raise InvalidConfig(
            f"{config.architecture}: models with {' and '.join(found)} cannot be divided among "
            "ranks yet: leave out --tensor-parallel-size"
        )
    size, moe = shard.size, config.moe
    if shard.has_whole_experts and moe is None:
        raise InvalidConfig(f"--enable-expert-parallel: {config.architecture} has no experts")
    parts = {
        "heads": {config.num_heads},
        "numbers of an MLP": {layer.mlp_size for layer in config.layers},
    }
    if moe is not None:
        whole, divided = {"experts": {moe.num_experts}}, {"numbers of an expert": {moe.expert_size}}
        parts |= whole if shard.has_whole_experts else divided
        parts["numbers of shared experts"] = {moe.shared_size}
    faults = [
        f"{count} {name}" for name, counts in parts.items() for count in counts if count % size
    ]
    all_kv_heads = {config.of_layer(i).num_kv_heads for i in config.attention_layers}
    faults += [f"{heads} KV heads" for heads in all_kv_heads if heads % size and size % heads]
    if faults:
        raise InvalidConfig(
            f"{' and '.join(faults)} cannot be divided by --tensor-parallel-size {size}"
        )
    return replace(
        config,
        vocab_size=len(shard.rows_of(config.vocab_size)),
        num_heads=config.num_heads // size,
        num_kv_heads=len(shard.part_of(config.num_kv_heads)),
        layers=tuple(_shard_layer(layer, shard) for layer in config.layers),
        cache_places=config.kv_places(),
        moe=None if moe is None else _shard_experts(moe, shard),
    )


def _shard_layer(layer: LayerConfig, shard: Shard) -> LayerConfig:
    heads = layer.kv_heads
    if heads is not None:
        heads = heads._replace(num=len(shard.part_of(heads.num)))
    return replace(layer, mlp_size=layer.mlp_size // shard.size, kv_heads=heads)


def _shard_experts(moe: MoeConfig, shard: Shard) -> MoeConfig:
    moe = replace(moe, shared_size=moe.shared_size // shard.size)
    if shard.has_whole_experts:
        return replace(moe, own_experts=shard.part_of(moe.num_experts))
    return replace(moe, expert_size=moe.expert_size // shard.size)


COLUMN_GROUPS = "g_idx"  # end of the names of tensors with the group of each column
Ranges = Sequence[range]  # the rank's numbers along an axis


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """Implements `Tensors` of one rank: of each tensor that ranks divide, its own part."""

    whole: Tensors
    map: TensorMap  # of the own parts
    own: Mapping[str, Sequence[Ranges]]  # by tensor, then by axis

    @classmethod
    def of(cls, config: ModelConfig, whole: Tensors, shard: Shard) -> ShardedTensors:
        """Check and divide the tensors of a model. Raises InvalidConfig if that is not possible."""
        recorded = check_tensors(config, whole)
        tensors = TensorMap(config, whole.shapes())
        shard_map, sizes = tensors.of_shard(shard_config(config, shard)), recorded.parts()
        own = {
            name: [own_ranges(shard, *axis) for axis in zip(axes, sizes[name], strict=True)]
            for name, axes in record(shard_map).parts().items()
        }
        for linear in {tensors.embedding, tensors.head}:
            own[f"{linear}.weight"] = [
                [shard.rows_of(config.vocab_size)],
                [range(config.hidden_size)],
            ]
        stored = {
            part.name: [_of_stored(part.name, axis, own[name], sizes[name]) for axis in part.axes]
            for name, parts in stored_parts(tensors, recorded.shapes(), whole.names()).items()
            for part in parts
            if name in own
        }
        _check_order(whole, stored)
        return cls(whole, shard_map, stored)

    def names(self) -> list[str]:
        return self.whole.names()

    def shapes(self) -> dict[str, Shape]:
        return {name: self._shape(name, whole) for name, whole in self.whole.shapes().items()}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        """Do nothing: the whole tensors are checked."""

    def tensor(self, name: str) -> Tensor:
        whole = self.whole.tensor(name)
        own = narrow(whole, self.own.get(name, ()))
        # Groups of columns count from the first own one.
        return own - own[0] if name.endswith(COLUMN_GROUPS) and len(own) < len(whole) else own

    def part(self, name: str, index: int) -> Tensor:
        first, others = self._of_element(name)
        return narrow(self.whole.part(name, first + index), others)

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.tensor(name))

    def quantized(self, name: str, index: int | None = None) -> Sequence[Quantized] | None:
        if index is None:
            parts, axes = self.whole.quantized(name), self.own.get(name)
        else:
            first, axes = self._of_element(name)
            parts = self.whole.quantized(name, first + index)
        if parts is None or not axes:
            return parts
        rows, columns = axes
        found, first = [], 0
        for part in parts:
            end = first + len(part.numbers)
            wanted = [at - first for own in rows for at in own if first <= at < end]
            if wanted:
                found.append(_cut(name, part, wanted, columns))
            first = end
        return found

    def identities(self) -> Sequence[FileIdentity]:
        return self.whole.identities()

    def digest(self) -> str:
        """Return that of the whole tensors: all ranks have the same."""
        return self.whole.digest()

    def _shape(self, name: str, whole: Shape) -> Shape:
        axes = self.own.get(name)
        return whole if axes is None else tuple(sum(map(len, ranges)) for ranges in axes)

    def _of_element(self, name: str) -> tuple[int, Sequence[Ranges]]:
        """Return the first own element of a tensor, and the own numbers along its axes."""
        [elements], *axes = self.own[name]
        return elements.start, axes


def own_ranges(shard: Shard, own: Sequence[int], whole: Sequence[int]) -> Ranges:
    """Return the own numbers of an axis: those of each part that is stacked along it."""
    if own == whole:
        return [range(sum(whole))]
    starts = [0, *itertools.accumulate(whole)]
    found = []
    for start, size, of in zip(starts, own, whole, strict=False):
        [part] = shard.part_of(of // size)  # with fewer parts than ranks, some share one
        found.append(range(start + part * size, start + (part + 1) * size))
    return found


def _of_stored(
    name: str, axis: PartAxis, own: Sequence[Ranges], sizes: Sequence[Sequence[int]]
) -> Ranges:
    """Return the own numbers along an axis of a stored part of a quantized matrix."""
    if axis.of is None:
        return [range(axis.unit)]
    ranges, unit, count = own[axis.of], axis.unit, sum(sizes[axis.of])
    if unit >= count > 1:  # one for all
        return [range(1)]
    if any(each.start % unit or (each.stop % unit and each.stop != count) for each in ranges):
        raise InvalidConfig(
            f"{name}: {unit} numbers that belong together would be divided among ranks; use a "
            "smaller --tensor-parallel-size, or weights in bfloat16"
        )
    return [range(each.start // unit, -(-each.stop // unit)) for each in ranges]


def _check_order(whole: Tensors, own: Mapping[str, Sequence[Ranges]]) -> None:
    """Raise InvalidConfig if columns that are divided have an order of their own (act-order)."""
    for name, axes in own.items():
        if name.endswith(COLUMN_GROUPS) and len(axes[0][0]) < whole.shapes()[name][0]:
            groups = whole.tensor(name)
            if not torch.equal(groups, groups.sort().values):
                raise InvalidConfig(
                    f"{name}: columns in the order of activations cannot be divided among ranks: "
                    "leave out --tensor-parallel-size"
                )


def narrow(tensor: Tensor, axes: Sequence[Ranges]) -> Tensor:
    """Return the own numbers of a tensor, without copying it where they are neighbours."""
    for axis, ranges in enumerate(axes):
        parts = [tensor.narrow(axis, own.start, len(own)) for own in ranges]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
    return tensor


def _cut(name: str, matrix: Quantized, rows: Sequence[int], columns: Ranges) -> Quantized:
    if len(rows) < len(matrix.numbers):
        matrix = matrix.rows(torch.tensor(rows))
    wanted = torch.tensor([at for own in columns for at in own])
    if len(wanted) == matrix.numbers.shape[1]:
        return matrix
    cut = matrix.columns(wanted)
    if cut is None:
        raise InvalidConfig(
            f"{name}: the {matrix.group} columns of a scale would be divided among ranks; use a "
            "smaller --tensor-parallel-size, or weights in bfloat16"
        )
    return cut
