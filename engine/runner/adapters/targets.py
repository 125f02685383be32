"""Matrices of the files that adapters can change, and the places of their rows in the decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.model.adapters import ROUTER, Place
from baton.engine.runner.model.config import ModelConfig, MoeConfig
from baton.engine.runner.weights.decoder_weights import record_layer
from baton.engine.runner.weights.loader import Stack, parts_of
from baton.engine.runner.weights.tensor_names import TensorMap

# Modules whose parameters stack the matrices of all experts, as [experts, rows, columns].
STACKED = ("mlp.experts", "block_sparse_moe.experts")
Key = tuple[int, str]  # layer, and the name of a matrix in it
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Run(NamedTuple):
    """Neighbouring rows of a place that come from one matrix of the files."""

    first_row: int
    rows: Sequence[int]  # of the matrix


class Piece(NamedTuple):
    """Rows of a matrix that go to one place."""

    place: Place
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix of the files."""

    num_rows: int
    num_columns: int
    pieces: Sequence[Piece] = ()
    heads: HeadRows | None = None
    row_parts: Sequence[int] = ()  # sizes of the parts that follow each other; empty: one
    form: int = 0  # a folder names the matrices of experts in one of several

    @property
    def place(self) -> Place:
        """Return the first place of its rows."""
        return self.pieces[0].place if self.heads is None else Place(self.heads.layer, "key", 0)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a matrix that are split by head: keys, which are used transposed, then values."""

    layer: int
    count: int
    key_dim: int


def find_targets(config: ModelConfig) -> Mapping[Key, Target]:
    """Return the matrices by layer and name. A stacked one is found as that of each expert.

    There are none in a model whose folder numbers blocks instead of layers, whose layers have
    attention and a state, or whose recurrent layers have matrices that are multiplied in turn.
    """
    if any(layer.block is not None or layer.has_parallel_state for layer in config.layers):
        return {}
    tensors = TensorMap(config)
    return {} if tensors.names.recurrent.low_rank else dict(_Targets(tensors).all())


def expert_name(module: str, parameter: str, expert: int) -> str:
    """Return the name of one expert's matrix of a stacked parameter."""
    return f"{module}.{parameter}[{expert}]"


class _Targets:
    def __init__(self, tensors: TensorMap) -> None:
        self._tensors = tensors
        self._config = tensors.config

    def all(self) -> Iterator[tuple[Key, Target]]:
        moe, names = self._config.moe, self._tensors.names.experts
        for index, layer in enumerate(self._config.layers):
            for name, target in self._of_layer(index).items():
                yield (index, name), target
            # Experts beside a dense MLP are not changed.
            if layer.has_parallel_experts or moe is None or names is None or not layer.has_experts:
                continue
            for expert in moe.loaded_experts:
                for name, target in self._expert(index, moe, names, expert):
                    yield (index, name), target

    def _of_layer(self, index: int) -> Mapping[str, Target]:
        """Return the matrices of a layer, apart from experts."""
        found: dict[str, Target] = {}
        for stack in record_layer(self._tensors, index).stacks:
            if stack.place is None or not self._is_changed(stack.place):
                continue
            for name, target in self._of_stack(stack, stack.place):
                pieces = found[name].pieces if name in found else ()
                found[name] = replace(target, pieces=[*pieces, *target.pieces])
        return found

    def _is_changed(self, place: Place) -> bool:
        is_parallel = self._config.layers[place.layer].has_parallel_experts
        return place.number is None and not (is_parallel and place.name == ROUTER)

    def _of_stack(self, stack: Stack, place: Place) -> Iterator[tuple[str, Target]]:
        prefix, latent = self._tensors.in_layer(place.layer, ""), self._config.latent
        stack = replace(stack, names=[name.removeprefix(prefix) for name in stack.names])
        if place.name == "key" and latent is not None:
            [name], [(num_rows, num_columns)] = stack.names, stack.shapes()
            heads = HeadRows(place.layer, self._config.num_heads, latent.nope_dim)
            yield name, Target(num_rows, num_columns, heads=heads)
        else:
            yield from _joined(stack)

    def _expert(
        self, index: int, moe: MoeConfig, names: ExpertNames, expert: int
    ) -> Iterator[tuple[str, Target]]:
        for number, form in enumerate(self._expert_forms(index, moe, names, expert)):
            for name, target in form:
                yield name, replace(target, form=number)

    def _expert_forms(
        self, index: int, moe: MoeConfig, names: ExpertNames, expert: int
    ) -> Iterator[Sequence[tuple[str, Target]]]:
        hidden, size = self._config.hidden_size, moe.expert_size
        number = expert - moe.loaded_experts.start
        gate_up, down = Place(index, "gate_up", number), Place(index, "down", number)
        halves = (2 * size,) if names.is_interleaved else (size, size)
        for form in (names, *names.others):
            if "{expert}" in form.down:
                parts = [name.format(expert=expert) for name in form.gate_up]
                rows = [size, size] if len(parts) == 2 else [halves]
                downs = [form.down.format(expert=expert)]
                yield [
                    *_joined(Stack(parts, rows, hidden, place=gate_up)),
                    *_joined(Stack(downs, [hidden], size, place=down)),
                ]
        runs = [Run(0, range(2 * size))]
        if names.is_interleaved:
            runs = [Run(0, range(0, 2 * size, 2)), Run(size, range(1, 2 * size, 2))]
        for module in STACKED:
            target = Target(2 * size, hidden, [Piece(gate_up, runs)], row_parts=halves)
            downs = [expert_name(module, DOWN, expert)]
            yield [
                (expert_name(module, GATE_UP, expert), target),
                *_joined(Stack(downs, [hidden], size, place=down)),
            ]


def _joined(stack: Stack) -> Iterator[tuple[str, Target]]:
    """Yield the matrices that a place stacks."""
    row_parts, order = list(map(parts_of, stack.rows)), stack.order
    counts = list(map(sum, row_parts))
    if order is not None and not stack.is_part:
        order = [*order, *range(len(order), sum(counts))]
    firsts = accumulate(counts, initial=0)
    assert stack.place is not None
    for name, first, count, parts in zip(stack.names, firsts, counts, row_parts, strict=False):
        runs = [Run(first, range(count))] if order is None else _runs(order, first, count)
        yield name, Target(count, stack.columns, [Piece(stack.place, runs)], row_parts=parts)


def _runs(stored: Sequence[int], first: int, count: int) -> Sequence[Run]:
    """Return the runs of stored rows that are some of a matrix, whose rows begin at `first`."""
    runs: list[Run] = []
    rows: list[int] = []
    for at, row in enumerate([*stored, -1]):
        if first <= row < first + count:
            rows.append(row - first)
        elif rows:
            runs.append(Run(at - len(rows), rows))
            rows = []
    return runs
