"""Positions for RoPE in which pictures are grids: of time, rows and columns (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.core.media import MediaSegment
from baton.engine.runner.model.pass_layout import Ints, TokenRun


def grid_positions(runs: Sequence[TokenRun]) -> Ints | None:
    """Return the positions of each token, [3, tokens]; None if no sequence has pictures."""
    if not any(run.row.media for run in runs):
        return None
    parts = [_positions(run.row.media, run.end - run.num_tokens, run.end) for run in runs]
    return np.concatenate(parts, axis=1)


def _positions(media: Sequence[MediaSegment], start: int, end: int) -> Ints:
    """Return the positions of the tokens from `start` up to `end`.

    All three of a text token are the same, one more than the highest before it. Those of a picture
    count its rows and columns from there, so that later tokens are closer than by their number.
    """
    places = np.arange(start, end, dtype=np.int64)
    positions = np.tile(places, (3, 1))
    saved = 0  # by how much the positions of text are lower than its places
    for segment in media:
        if segment.start >= end:
            break
        is_after = places >= segment.start
        positions[:, is_after] = places[is_after] - saved
        is_inside = is_after & (places < segment.start + segment.num_tokens)
        row, column = np.divmod(places[is_inside] - segment.start, segment.columns)
        base = segment.start - saved
        positions[:, is_inside] = base + np.stack((0 * row, row, column))
        saved += segment.num_tokens - max(segment.columns, segment.num_tokens // segment.columns)
        is_later = places >= segment.start + segment.num_tokens
        positions[:, is_later] = places[is_later] - saved
    return positions
