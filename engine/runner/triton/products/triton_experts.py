"""Mixture of experts in Triton: routing, and products of rows sorted by expert on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
from torch import Tensor

from baton.engine.runner.model.linear import ExpertChoice, Linear, Mlp, Router, TorchLinear
from baton.engine.runner.triton.launching import PIECE_COLUMNS, launch, pieces, row_contiguous
from baton.engine.runner.triton.products.matrix_layout import MatrixLayout, plain_layout
from baton.engine.runner.triton.products.plain_linear import PlainLinear
from baton.engine.runner.triton.products.product_kernels import (
    experts_kernel,
    plan_tiles_kernel,
    sum_experts_kernel,
)
from baton.engine.runner.triton.products.routing_kernels import choose_experts_kernel
from baton.engine.runner.triton.products.triton_linear import (
    NUM_STAGES,
    ProductTile,
    TritonLinear,
    product_tile,
)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Matrices of one layout, one per expert. They stay where they are."""

    layout: MatrixLayout
    addresses: Tensor  # int64
    biases: Tensor | None  # [experts, rows]
    orders: Tensor | None  # int32 [experts, columns]: permute the activations
    owners: Sequence[Tensor]  # own the memory at the addresses


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer."""

    gate_up: ExpertMatrices
    down: ExpertMatrices
    bounds: Tensor  # 0, 1, …, number of experts


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows, tokens times ranks, sorted by expert and cut into tiles."""

    row_ids: Tensor  # int64, in the sorted order: token * top_k + rank
    expert_starts: Tensor  # int32: first sorted row of each expert; last, the number of rows
    tiles: Tensor  # int32: see `plan_tiles_kernel`
    tile: ProductTile
    top_k: int

    @property
    def max_tiles(self) -> int:
        return len(self.tiles) // 2


class AddToExperts(Protocol):
    """Adds products of adapters to outputs of experts, in the memory of these."""

    def __call__(
        self, src: Tensor, dst: Tensor, rows: ExpertRows, scales: Tensor | None, *, is_down: bool
    ) -> None: ...


def choose_experts(logits: Tensor, router: Router) -> ExpertChoice:
    """Choose the experts of each token from contiguous logits, [tokens, experts], in float32."""
    config, bias = router.config, router.correction_bias
    expert_ids = torch.empty(len(logits), config.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty_like(expert_ids, dtype=torch.float32)
    launch(
        choose_experts_kernel,
        (len(logits),),
        expert_ids,
        weights,
        logits,
        logits if bias is None else bias,
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        group_best=min(config.group_best, config.num_experts // config.num_groups),
        scoring=config.scoring.value,
        scale=config.scale,
        normalizes=config.normalizes,
        has_correction=bias is not None,
        padded_groups=triton.next_power_of_2(config.num_groups),
        padded_experts=triton.next_power_of_2(config.num_experts // config.num_groups),
        padded_k=triton.next_power_of_2(config.top_k),
        num_warps=1,
    )
    return ExpertChoice(expert_ids, weights)


def join_experts(experts: Sequence[Mlp]) -> Experts | None:
    """Return None if the kernels cannot compute these experts together."""
    gate_up = _join([mlp.gate_up for mlp in experts])
    down = _join([mlp.down for mlp in experts])
    if gate_up is None or down is None:
        return None
    bounds = torch.arange(len(experts) + 1, device=gate_up.addresses.device)
    return Experts(gate_up, down, bounds)


def sort_rows(experts: Experts, routing: ExpertChoice, dtype: torch.dtype) -> ExpertRows:
    """Sort the rows of tokens by expert. `dtype` is that of the activations."""
    num_rows, num_experts = routing.expert_ids.numel(), len(experts.bounds) - 1
    sorted_ids, row_ids = routing.expert_ids.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_ids, experts.bounds, out_int32=True)
    tile = product_tile(num_rows / num_experts, dtype)
    max_tiles = min(num_rows, num_rows // tile.num_tokens + num_experts)
    tiles = starts.new_empty(2 * max_tiles + 1)
    launch(
        plan_tiles_kernel,
        (1,),
        tiles,
        starts,
        max_tiles,
        num_experts,
        tile_tokens=tile.num_tokens,
        padded_experts=triton.next_power_of_2(num_experts),
    )
    return ExpertRows(row_ids, starts, tiles, tile, routing.expert_ids.shape[1])


def multiply_experts(
    matrices: ExpertMatrices,
    src: Tensor,
    rows: ExpertRows,
    scales: Tensor | None = None,
    *,
    is_down: bool = False,
) -> Tensor:
    """Multiply each row with the matrix of its expert. `scales` are those of its inputs."""
    src, layout, tile = row_contiguous(src), matrices.layout, rows.tile
    dst = src.new_empty(len(rows.row_ids), layout.num_rows)
    launch(
        experts_kernel,
        (rows.max_tiles, triton.cdiv(layout.num_rows, tile.num_rows)),
        dst,
        src,
        matrices.addresses,
        dst if matrices.biases is None else matrices.biases,
        dst if matrices.orders is None else matrices.orders,
        dst if scales is None else scales,
        rows.row_ids,
        rows.expert_starts,
        rows.tiles,
        rows.max_tiles,
        src.stride(0),
        rows.top_k,
        matrix=layout,
        tile_tokens=tile.num_tokens,
        tile_rows=tile.num_rows,
        has_bias=matrices.biases is not None,
        has_order=matrices.orders is not None,
        scales_input=scales is not None,
        is_down=is_down,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    return dst


def sum_experts(outputs: Tensor, weights: Tensor, *, weighs: bool) -> Tensor:
    """[tokens * top_k, size] → [tokens, size]: sum of each token's outputs, weighted if asked."""
    num_tokens, top_k = weights.shape
    dst = outputs.new_empty(num_tokens, outputs.shape[1])
    launch(
        sum_experts_kernel,
        pieces(dst),
        dst,
        outputs,
        weights,
        dst.shape[1],
        top_k,
        weighs=weighs,
        num_columns=PIECE_COLUMNS,
    )
    return dst


def _join(linears: Sequence[Linear]) -> ExpertMatrices | None:
    """Return None if layouts differ, or if only some matrices have a bias or a column order."""
    found = [_matrix(linear) for linear in linears]
    known = [each for each in found if each is not None]
    if len(known) < len(found) or len({layout for layout, *_ in known}) > 1:
        return None
    biases = [bias for _, _, bias, _ in known if bias is not None]
    orders = [order for _, _, _, order in known if order is not None]
    if len(biases) not in (0, len(known)) or len(orders) not in (0, len(known)):
        return None
    owners = [data for _, data, _, _ in known]
    addresses = torch.tensor([data.data_ptr() for data in owners])
    return ExpertMatrices(
        known[0][0],
        addresses.to(owners[0].device),
        torch.stack(biases) if biases else None,
        torch.stack(orders) if orders else None,
        owners,
    )


def _matrix(linear: Linear) -> tuple[MatrixLayout, Tensor, Tensor | None, Tensor | None] | None:
    """Return layout, memory, bias and column order, None for other implementations."""
    if isinstance(linear, TorchLinear | PlainLinear):
        return plain_layout(*linear.weight.shape), linear.weight.contiguous(), linear.bias, None
    if isinstance(linear, TritonLinear):
        return linear.layout, linear.packed, linear.bias, linear.column_order
    return None
