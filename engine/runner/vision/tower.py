"""Vision tower: turns pictures into what a decoder takes in place of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.media import Picture
from baton.engine.runner.batch.encodings import LayerDone
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.vision.config import Merge, Positions, ProjectorConfig, VisionConfig
from baton.engine.runner.vision.ops import TorchVisionOps
from baton.engine.runner.vision.patches import PatchLayout, layout_patches, patch_pixels
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
