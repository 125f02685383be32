"""Patches of a picture: their order, their places, their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from baton.core.media import NUM_CHANNELS, Picture
from baton.engine.runner.vision.config import PixelScaling, VisionConfig


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Places of a picture's patches: the patches of a token, and the tokens of a window, adjoin."""

    grid: tuple[int, int]  # rows and columns of patches
    rows: Tensor  # of each patch
    columns: Tensor
    token_order: Tensor | None  # index of each token, row by row; None: they are in order
    window_lens: Sequence[int]  # patches of each window; one window without windows

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def num_patches(self) -> int:
        return len(self.rows)

    def in_order(self, tokens: Tensor) -> Tensor:
        """Return tokens row by row."""
        if self.token_order is None:
            return tokens
        ordered = torch.empty_like(tokens)
        ordered[self.token_order] = tokens
        return ordered


def layout_patches(
    config: VisionConfig, height: int, width: int, device: torch.device
) -> PatchLayout:
    """Return the places of patches. Raises ValueError for pixels that the tower cannot encode."""
    num_rows, num_columns = config.token_grid(height, width)
    merge, unit = config.merge_size, config.merge_size**2
    order, lens = None, [num_rows * num_columns * unit]
    tokens = torch.arange(num_rows * num_columns)
    if config.window_size is not None:
        windows_per_row = -(-num_columns // config.window_size)
        window = tokens // num_columns // config.window_size * windows_per_row
        window = window + tokens % num_columns // config.window_size
        order = tokens = torch.argsort(window, stable=True)
        lens = (unit * window.bincount()).tolist()
    places = torch.arange(unit)
    rows = (tokens // num_columns * merge)[:, None] + places // merge
    columns = (tokens % num_columns * merge)[:, None] + places % merge
    order = None if order is None else order.to(device)
    rows, columns = rows.flatten().to(device), columns.flatten().to(device)
    return PatchLayout((num_rows * merge, num_columns * merge), rows, columns, order, lens)


def patch_pixels(config: VisionConfig, picture: Picture, layout: PatchLayout) -> Tensor:
    """Return the scaled pixels of each patch, [patches, channels * rows * columns], in float32."""
    size, (num_rows, num_columns) = config.patch_size, layout.grid
    pixels = torch.frombuffer(bytearray(picture.rgb), dtype=torch.uint8).to(layout.device)
    table = _scaled_values(config.scaling).to(layout.device)
    rows = pixels.view(picture.height, picture.width, NUM_CHANNELS)
    seen = rows[: num_rows * size, : num_columns * size]
    channels = seen.long().reshape(-1, NUM_CHANNELS).T
    scaled = table.gather(1, channels).view(NUM_CHANNELS, num_rows, size, num_columns, size)
    patches = scaled.permute(1, 3, 0, 2, 4).reshape(num_rows * num_columns, -1)
    return patches[layout.rows * num_columns + layout.columns]


@cache
def _scaled_values(scaling: PixelScaling) -> Tensor:
    """Return what each pixel value becomes in each channel, [channels, 256].

    As processors of transformers compute it: scaled in float64, normalised in float32.
    """
    rescaled = (torch.arange(256, dtype=torch.float64) * scaling.factor).float()
    mean, deviation = (torch.tensor(each)[:, None] for each in (scaling.mean, scaling.deviation))
    return (rescaled - mean) / deviation
