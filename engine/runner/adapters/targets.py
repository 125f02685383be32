"""Matrices of the files that adapters can change, and the places of their rows in the decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.model.adapters import ROUTER, Place
from baton.engine.runner.model.config import LatentConfig, ModelConfig, MoeConfig
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.weights.row_orders import joined_order, latent_orders
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
        self._names = tensors.names
        self._parts = tensors.parts()

    def all(self) -> Iterator[tuple[Key, Target]]:
        for index in range(self._config.num_layers):
            for name, target in self._of_layer(index):
                yield (index, name), target

    def _of_layer(self, index: int) -> Iterator[tuple[str, Target]]:
        config, names, layer = self._config, self._names, self._config.layers[index]
        if layer.is_recurrent:
            yield from self._recurrent(index)
        elif config.latent is not None:
            yield from self._latent(index, config.latent)
        else:
            own, qkv = config.of_layer(index), self._tensors.qkv(index)
            yield from self._joined(Place(index, "qkv"), qkv, joined_order(own))
            yield from self._joined(Place(index, "output"), [names.output])
        if layer.mlp_size:
            yield from self._joined(Place(index, "gate_up"), names.gate_up)
            yield from self._joined(Place(index, "down"), [names.down])
        elif config.moe is not None and names.experts is not None:
            yield from self._mixture(index, config.moe, names.experts)

    def _recurrent(self, index: int) -> Iterator[tuple[str, Target]]:
        recurrent, names = self._config.recurrent, self._names.recurrent
        assert recurrent is not None
        orders = RULES[recurrent.rule].stored_rows(recurrent)
        places = Place(index, "qkv"), Place(index, "gates")
        if names.gates:
            order, gate_order = orders if len(names.projections) == 1 else (None, None)
            yield from self._joined(places[0], names.projections, order)
            yield from self._joined(places[1], names.gates, gate_order)
        else:
            [name] = names.projections
            num_rows, num_columns = self._shape(index, name)
            runs = [_runs(order, 0, num_rows) for order in orders]
            yield name, Target(num_rows, num_columns, list(map(Piece, places, runs)))
        yield from self._joined(Place(index, "output"), [names.output])

    def _latent(self, index: int, latent: LatentConfig) -> Iterator[tuple[str, Target]]:
        names, config = self._names.latent, self._config
        query_order, key_order = latent_orders(latent, config)
        query, order = names.query, query_order
        if latent.query_rank is not None:
            query, order = names.query_down, list(range(latent.query_rank))
            yield from self._joined(Place(index, "query_up"), [names.query_up], query_order)
        order = [*order, *(len(order) + row for row in key_order)]
        yield from self._joined(Place(index, "qkv"), [query, names.key_down], order)
        heads = HeadRows(index, config.num_heads, latent.nope_dim)
        yield names.key_up, Target(*self._shape(index, names.key_up), heads=heads)
        yield from self._joined(Place(index, "output"), [self._names.output])

    def _mixture(
        self, index: int, moe: MoeConfig, names: ExpertNames
    ) -> Iterator[tuple[str, Target]]:
        yield from self._joined(Place(index, ROUTER), [names.router])
        if moe.shared_size:
            gate_up = [f"{names.shared}.{name}" for name in names.shared_gate_up]
            yield from self._joined(Place(index, "shared_gate_up"), gate_up)
            down = f"{names.shared}.{names.shared_down}"
            yield from self._joined(Place(index, "shared_down"), [down])
        if moe.has_shared_gate:
            yield from self._joined(Place(index, "shared_gate"), [names.shared_gate])
        for expert in moe.loaded_experts:
            yield from self._expert(index, moe, names, expert)

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
                counts = [(size,), (size,)] if len(parts) == 2 else [halves]
                downs = [form.down.format(expert=expert)]
                yield [
                    *_joined(gate_up, parts, counts, hidden),
                    *_joined(down, downs, [(hidden,)], size),
                ]
        runs = [Run(0, range(2 * size))]
        if names.is_interleaved:
            runs = [Run(0, range(0, 2 * size, 2)), Run(size, range(1, 2 * size, 2))]
        for module in STACKED:
            target = Target(2 * size, hidden, [Piece(gate_up, runs)], row_parts=halves)
            downs = [expert_name(module, DOWN, expert)]
            yield [
                (expert_name(module, GATE_UP, expert), target),
                *_joined(down, downs, [(hidden,)], size),
            ]

    def _joined(
        self, place: Place, names: Sequence[str], order: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Target]]:
        row_parts = [self._axes(place.layer, name)[0] for name in names]
        return _joined(place, names, row_parts, self._shape(place.layer, names[0])[1], order)

    def _shape(self, index: int, name: str) -> tuple[int, int]:
        rows, columns = map(sum, self._axes(index, name))
        return rows, columns

    def _axes(self, index: int, name: str) -> Sequence[Sequence[int]]:
        """Return the sizes of a matrix's parts along both axes."""
        return self._parts[f"{self._tensors.in_layer(index, name)}.weight"]


def _joined(
    place: Place,
    names: Sequence[str],
    row_parts: Sequence[Sequence[int]],
    num_columns: int,
    order: Sequence[int] | None = None,
) -> Iterator[tuple[str, Target]]:
    """Yield the matrices that a place stacks. `order` is that of the first of all rows."""
    counts = list(map(sum, row_parts))
    firsts = accumulate(counts, initial=0)
    for name, first, count, parts in zip(names, firsts, counts, row_parts, strict=False):
        runs: Sequence[Run] = [Run(first, range(count))]
        if order is not None:
            runs = _runs([*order, *range(len(order), sum(counts))], first, count)
        yield name, Target(count, num_columns, [Piece(place, runs)], row_parts=parts)


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
