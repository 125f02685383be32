"""Products of adapters in Triton: two launches for a linear layer, whatever the adapters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from baton.engine.runner.adapters.low_rank import ExpertPass, LowRankProducts, convert_parts
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.model.adapters import (
    ROUTER,
    Adapter,
    Group,
    Part,
    Place,
    PlaceSize,
    Selection,
)
from baton.engine.runner.model.linear import ExpertChoice, Router
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.triton.adapters.low_rank_kernels import expand_kernel, project_kernel
from baton.engine.runner.triton.adapters.low_rank_tables import (
    TokenTables,
    TritonAdapter,
    by_place,
    largest_size,
    make_table,
    triton_adapter,
)
from baton.engine.runner.triton.launching import launch, row_contiguous
from baton.engine.runner.triton.products.triton_experts import ExpertRows, choose_experts
from baton.engine.runner.triton.triton_ops import TritonOps

TILE_RANKS, TILE_COLUMNS = 16, 128
TILE_ROWS = 256
LINEAR, HEADS, GATE_UP, DOWN = "linear", "heads", "gate_up", "down"


class _Rows(NamedTuple):
    """Rows of a product: those of tokens, of their heads, or of their experts."""

    num_rows: int
    kind: str = LINEAR
    num_per_token: int = 1
    row_ids: Tensor | None = None  # of experts: token * top_k + rank
    expert_ids: Tensor | None = None  # by row id
    scales: Tensor | None = None  # of inputs, by row id


class TritonLowRankProducts(LowRankProducts):
    """Products with kernels. One thread adds, while another one can prepare."""

    merges_routers = False
    has_static_launches = True

    def __init__(self) -> None:
        self._indices: dict[Place, int] = {}  # in the tables of all adapters
        self._compiled = set[tuple[str, torch.dtype, tuple[int, int]]]()  # sizes of in- and outputs

    def prepare(
        self, parts: Mapping[Place, Sequence[Part]], like: Tensor, num_layers: int
    ) -> Adapter:
        of_routers = {place: its for place, its in parts.items() if place.name == ROUTER}
        others = {place: its for place, its in parts.items() if place.name != ROUTER}
        converted = {**convert_parts(others, like), **convert_parts(of_routers, like.float())}
        places = by_place(converted)
        self._index(places)
        numbers = make_table({self._indices[place]: its for place, its in places.items()})
        adapter = TritonAdapter(
            converted,
            table=torch.tensor(numbers).to(like.device),
            sizes={place: largest_size(its) for place, its in places.items()},
        )
        self._compile(adapter, like.device)
        return adapter

    def put(
        self,
        selection: Selection,
        inputs: StepInputs,
        sizes: Mapping[Place, PlaceSize] | None = None,
    ) -> TokenTables:
        self._index(sizes or {})
        adapters = [*map(triton_adapter, selection.adapters)]
        addresses = np.array([*(each.address for each in adapters), 0], dtype=np.int64)
        return TokenTables(inputs.put(addresses[selection.indices]), adapters, sizes)

    def add(self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor) -> None:
        if place.number is not None:
            # Experts and heads have a table of their own, of which this reads one entry.
            ids = torch.arange(len(inputs), device=inputs.device)
            expert_ids = torch.full_like(ids, place.number)
            rows = _Rows(len(inputs), GATE_UP, 1, ids, expert_ids)
            self._add(place._replace(number=None), groups, inputs, outputs, rows)
        else:
            self._add(place, groups, inputs, outputs, _Rows(len(inputs)))

    def add_to_heads(
        self, layer: int, name: str, groups: Sequence[Group], inputs: Tensor, outputs: Tensor
    ) -> Tensor:
        outputs = row_contiguous(outputs)
        num_tokens, num_heads, _ = inputs.shape
        rows = _Rows(num_tokens * num_heads, HEADS, num_heads)
        self._add(Place(layer, name), groups, inputs, outputs, rows)
        return outputs

    def route(
        self, ops: Ops, router: Router, layer: int, inputs: Tensor, groups: Sequence[Group]
    ) -> ExpertChoice | None:
        wide = inputs.float()
        logits = ops.linear(router.weight, router.bias)(wide)
        self.add(Place(layer, ROUTER), groups, wide, logits)
        return choose_experts(logits, router)

    def mix_experts(self, pass_: ExpertPass, groups: Sequence[Group]) -> Tensor | None:
        ops, moe, layer, gate, inputs, routing = pass_
        experts = ops.join_experts(moe) if isinstance(ops, TritonOps) else None
        if experts is None or not isinstance(ops, TritonOps):
            return None
        tables = TokenTables.of(groups, len(inputs), inputs.device)
        add = partial(self._add_to_experts, layer, tables, routing)
        return ops.mix_joined_experts(experts, moe, gate, inputs, routing, add)

    def _add_to_experts(
        self,
        layer: int,
        groups: Sequence[Group],
        routing: ExpertChoice,
        src: Tensor,
        dst: Tensor,
        sorted_rows: ExpertRows,
        scales: Tensor | None,
        *,
        is_down: bool,
    ) -> None:
        row_ids, expert_ids = sorted_rows.row_ids, routing.expert_ids.contiguous()
        name = DOWN if is_down else GATE_UP
        rows = _Rows(len(row_ids), name, sorted_rows.top_k, row_ids, expert_ids, scales)
        self._add(Place(layer, name), groups, src, dst, rows)

    def _add(
        self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor, rows: _Rows
    ) -> None:
        """Add to outputs, [tokens or rows, rows of the matrix] or [tokens, heads, rows]."""
        tables = TokenTables.of(groups, len(inputs), inputs.device)
        index, (max_parts, max_rank) = self._indices.get(place), tables.size(place)
        if index is None or not max_parts:
            return
        src, num_rows = row_contiguous(inputs), outputs.shape[-1]
        rank_tiles = triton.cdiv(max_rank, TILE_RANKS)
        shape = rows.num_rows, max_parts, rank_tiles * TILE_RANKS
        hidden = torch.empty(shape, dtype=torch.float32, device=src.device)
        addresses, nothing = tables.addresses, tables.addresses
        row_ids = nothing if rows.row_ids is None else rows.row_ids
        expert_ids = nothing if rows.expert_ids is None else rows.expert_ids
        launch(
            project_kernel,
            (rows.num_rows, max_parts, rank_tiles),
            hidden,
            src,
            addresses,
            row_ids,
            expert_ids,
            hidden if rows.scales is None else rows.scales,
            index,
            rows.num_per_token,
            *_strides(src),
            src.shape[-1],
            *shape[1:],
            kind=rows.kind,
            scales_input=rows.scales is not None,
            tile_ranks=TILE_RANKS,
            tile_columns=TILE_COLUMNS,
        )
        launch(
            expand_kernel,
            (rows.num_rows, triton.cdiv(num_rows, TILE_ROWS)),
            outputs,
            hidden,
            addresses,
            row_ids,
            expert_ids,
            index,
            rows.num_per_token,
            *_strides(outputs),
            num_rows,
            *shape[1:],
            kind=rows.kind,
            tile_rows=TILE_ROWS,
        )

    def _index(self, places: Mapping[Place, object]) -> None:
        """Give each new place an index in tables, which it keeps: graphs contain it."""
        for place in places:
            self._indices.setdefault(place, len(self._indices))

    def _compile(self, adapter: TritonAdapter, device: torch.device) -> None:
        """Launch the kernels for each new size, so that the first request does not wait for them.

        Loads have a thread of their own.
        """
        token = torch.zeros(1, dtype=torch.int64, device=device)
        groups = [Group(adapter, token)]
        for place, parts in adapter.parts.items():
            kind, part = _kind_of(place), parts[-1]
            shape = part.down.shape[1], part.first_row + part.up.shape[1]
            key = kind, part.down.dtype, shape
            if key in self._compiled:
                continue
            self._compiled.add(key)
            inputs, outputs = (part.down.new_zeros(1, 1, size) for size in shape)
            if kind == HEADS:
                self.add_to_heads(place.layer, place.name, groups, inputs, outputs)
                continue
            rows = _Rows(1, kind)
            if kind != LINEAR:
                rows = _Rows(1, kind, 1, token, torch.full_like(token, place.number or 0))
            own = place._replace(number=None)
            self._add(own, groups, inputs[0], outputs[0], rows)


def _kind_of(place: Place) -> str:
    if place.number is None:
        return LINEAR
    return place.name if place.name in (GATE_UP, DOWN) else HEADS


def _strides(rows: Tensor) -> tuple[int, int]:
    """Return the strides of tokens and of heads."""
    return rows.stride(0), rows.stride(1) if rows.dim() == 3 else 0
