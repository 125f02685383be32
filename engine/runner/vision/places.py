"""Learned and rotary positions of patches."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.runner.model.rope import Angles
from baton.engine.runner.vision.config import Positions, VisionConfig
from baton.engine.runner.vision.patches import PatchLayout


def learned_positions(config: VisionConfig, table: Tensor, layout: PatchLayout) -> Tensor:
    """Return the position of each patch, [patches, size]. The table has a row for each place."""
    side = config.position_side
    if config.positions is Positions.AXES:
        return table[0][layout.columns] + table[1][layout.rows]
    if config.positions is Positions.FIXED:
        return table[layout.rows * side + layout.columns]
    num_rows, num_columns = layout.grid
    if config.positions is Positions.BUCKETS:
        rows = _buckets(num_rows, side).to(layout.device)[layout.rows]
        columns = _buckets(num_columns, side).to(layout.device)[layout.columns]
        return table[rows * side + columns]
    row_taps, row_weights = _taps(num_rows, side, layout.device)
    column_taps, column_weights = _taps(num_columns, side, layout.device)
    result = table.new_zeros(layout.num_patches, table.shape[1])
    for row in range(2):
        for column in range(2):
            taps = row_taps[row][layout.rows] * side + column_taps[column][layout.columns]
            weights = row_weights[row][layout.rows] * column_weights[column][layout.columns]
            result += table[taps] * weights[:, None]
    return result


def rotary_angles(config: VisionConfig, layout: PatchLayout, dtype: torch.dtype) -> Angles | None:
    """Return cosines and sines: the first half of a pair's dimensions has those of rows."""
    if config.rope_theta is None:
        return None
    half = config.head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float, device=layout.device) / half
    by_row = 1.0 / config.rope_theta**exponents
    by_column = by_row
    if config.is_rope_alternating:
        by_column = 1.0 / config.rope_theta ** (exponents + 1 / half)
    turns = torch.cat((layout.rows[:, None] * by_row, layout.columns[:, None] * by_column), dim=1)
    turns = torch.cat((turns, turns), dim=1)[:, None]
    return turns.cos().to(dtype), turns.sin().to(dtype)


def _buckets(count: int, side: int) -> Tensor:
    """Return the place on the learned grid of each of the patches along a side.

    In the float32 of transformers: a patch on a boundary is where rounding puts it.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    step = 1.0 / torch.tensor(count)
    fractions = torch.arange(count, dtype=torch.float32) * step
    return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)


def _taps(count: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two nearest places of each patch along a side, and their weights: [2, count]."""
    indices = torch.arange(count, dtype=torch.float32, device=device)
    places = indices * (side - 1) / max(count - 1, 1)
    first = places.floor()
    after = places - first
    taps = torch.stack((first, first + 1)).long().clamp(max=side - 1)
    return taps, torch.stack((1 - after, after))
