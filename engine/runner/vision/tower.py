"""Vision tower: turns pictures, laid out as patches, into embeddings of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from baton.core.media import NUM_CHANNELS, Picture
from baton.engine.runner.batch.encodings import LayerDone
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.vision.config import (
    Merge,
    PixelScaling,
    Positions,
    ProjectorConfig,
    VisionConfig,
)
from baton.engine.runner.vision.ops import TorchVisionOps
from baton.engine.runner.vision.weights import (
    AnyNorm,
    ProjectorWeights,
    TowerLayer,
    TowerWeights,
)


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Patches, layers with norms before attention and MLP, or after them, too, and a projector."""

    config: VisionConfig
    ops: TorchVisionOps
    weights: TowerWeights
    dtype: torch.dtype
    device: torch.device

    def encode(
        self, pictures: Sequence[Picture], layer_done: LayerDone | None = None
    ) -> list[Tensor]:
        with torch.inference_mode():
            return [self._encode(picture, layer_done) for picture in pictures]

    def _encode(self, picture: Picture, layer_done: LayerDone | None) -> Tensor:
        config, weights = self.config, self.weights
        layout = layout_patches(config, picture.height, picture.width, self.device)
        hidden_states = self._embed(picture, layout)
        angles = rotary_angles(config, layout, self.dtype)
        levels = []
        for index, layer in enumerate(weights.layers):
            is_full = config.window_size is None or index in config.full_layers
            lens = [layout.num_patches] if is_full else layout.window_lens
            hidden_states = self._run_layer(layer, hidden_states, lens, angles)
            if index in config.level_layers and config.level_projector is not None:
                own = weights.level_projectors[config.level_layers.index(index)]
                levels.append(self._project(hidden_states, config.level_projector, own))
            if layer_done is not None:
                layer_done(index)
        if weights.final_norm is not None:
            hidden_states = self.ops.norm(hidden_states, weights.final_norm)
        tokens = self._project(hidden_states, config.projector, weights.projector)
        return layout.in_order(torch.cat((tokens, *levels), dim=1))

    def _embed(self, picture: Picture, layout: PatchLayout) -> Tensor:
        weights, pixels = self.weights, patch_pixels(self.config, picture, layout).to(self.dtype)
        if weights.pixel_norm is not None:
            pixels = self.ops.norm(pixels, weights.pixel_norm)
        hidden_states = weights.patches(pixels)
        if weights.patch_norm is not None:
            hidden_states = self.ops.norm(hidden_states, weights.patch_norm)
        if self.weights.positions is not None:
            positions = learned_positions(self.config, self.weights.positions, layout)
            hidden_states = hidden_states + positions.to(self.dtype)
        norm = self.weights.input_norm
        return hidden_states if norm is None else self.ops.norm(hidden_states, norm)

    def _run_layer(
        self, layer: TowerLayer, hidden_states: Tensor, lens: Sequence[int], angles: Angles | None
    ) -> Tensor:
        config, ops = self.config, self.ops
        qkv = layer.qkv(ops.norm(hidden_states, layer.attention_norm))
        if layer.head_norms:
            qkv = self._norm_heads(qkv, layer.head_norms)
        output = layer.output(ops.attend(qkv, config.num_heads, lens, angles))
        if layer.output_norm is not None:
            output = ops.norm(output, layer.output_norm)
        hidden_states = ops.add(hidden_states, output)
        inputs = layer.up(ops.norm(hidden_states, layer.mlp_norm))
        inner = ops.activate(inputs, config.activation, is_gated=config.is_gated)
        output = layer.down(inner)
        if layer.down_norm is not None:
            output = ops.norm(output, layer.down_norm)
        return ops.add(hidden_states, output)

    def _norm_heads(self, qkv: Tensor, norms: Sequence[AnyNorm]) -> Tensor:
        parts = qkv.unflatten(1, (3, -1, self.config.head_dim)).unbind(1)
        normed = [
            self.ops.norm(part.flatten(0, 1), norm).view(part.shape)
            for part, norm in zip(parts, norms, strict=True)
        ]
        return torch.stack(normed, dim=1).flatten(1)

    def _project(
        self, hidden_states: Tensor, config: ProjectorConfig, weights: ProjectorWeights
    ) -> Tensor:
        if weights.norm is not None and not config.norms_merged:
            hidden_states = self.ops.norm(hidden_states, weights.norm)
        squares = hidden_states.unflatten(0, (-1, self.config.merge_size**2))
        is_mean = self.config.merge is Merge.MEAN
        tokens = self._scale(squares.mean(1) if is_mean else squares.flatten(1))
        if weights.norm is not None and config.norms_merged:
            tokens = self.ops.norm(tokens, weights.norm)
        *linears, last = weights.linears
        for linear in linears:
            tokens = linear(tokens)
        if linears:
            tokens = self.ops.activate(tokens, config.activation, is_gated=False)
        return last(tokens)

    def _scale(self, tokens: Tensor) -> Tensor:
        """Scale and standardise tokens, in float32: they can exceed the range of float16."""
        config, standard = self.config, self.weights.standardization
        if config.token_scale == 1.0 and standard is None:
            return tokens
        scaled = tokens.float() * config.token_scale
        if standard is not None:
            scaled = (scaled - standard.bias) * standard.scale
        return scaled.to(tokens.dtype)


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
