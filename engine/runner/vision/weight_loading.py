"""Loads the weights of a vision tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.core.media import NUM_CHANNELS
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.rope import repeat_order
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import NormKind, Positions, ProjectorConfig
from baton.engine.runner.vision.table import ProjectorNames
from baton.engine.runner.vision.tensor_names import TowerTensors
from baton.engine.runner.vision.weights import (
    AnyNorm,
    ClippedLinears,
    ProjectorWeights,
    Standardization,
    TowerLayer,
    TowerWeights,
)
from baton.engine.runner.weights.loader import Stack, WeightLoader
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader

FRAMES = 2  # in which a patch of a video is stored
FLAT_DIMS = 2


def load_tower_weights(
    tensors: TowerTensors,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> TowerWeights:
    """Check and load them. Raises ModelError if the files do not fit the configuration."""
    recorder = WeightLoader()
    _TowerLoader(tensors, recorder).load()
    expected = {name: Expected(shape, FLOATS) for name, shape in recorder.shapes().items()}
    files.check(expected, tensors.is_ignored)
    # Four bits cost a tower more than its decoder, and packed towers are not kept on disk.
    quantize = "none" if target.quantize == "none" else "int8"
    target = replace(target, quantize=quantize, cached=None, importance={})
    num_expected = recorder.num_loaded
    loader = TensorLoader(files, target, on_progress=on_progress, num_expected=num_expected)
    return _TowerLoader(tensors, loader).load()


class _TowerLoader:
    def __init__(self, tensors: TowerTensors, loader: WeightLoader) -> None:
        self._tensors = tensors
        self._config = tensors.config
        self._names = tensors.names
        self._family = tensors.family
        self._loader = loader

    def load(self) -> TowerWeights:
        config, names, in_tower = self._config, self._names, self._tensors.in_tower
        levels = range(len(config.level_layers)) if names.level_projector else range(0)
        return TowerWeights(
            pixel_norm=self._pixel_norm(),
            patches=self._patches(in_tower(names.patches)),
            patch_norm=self._optional_norm(names.patch_norm),
            positions=self._positions(),
            input_norm=self._optional_norm(names.input_norm),
            layers=[self._layer(index) for index in range(config.num_layers)],
            final_norm=self._optional_norm(names.final_norm),
            standardization=self._standardization(),
            projector=self._projector(names.projector, config.projector),
            level_projectors=[
                self._projector(names.level_projector, config.level_projector, level)
                for level in levels
                if names.level_projector is not None and config.level_projector is not None
            ],
        )

    def _patches(self, name: str) -> Linear:
        """Load the convolution over patches. A picture is a video whose frames are the same."""
        weight = self._loader.vector(f"{name}.weight", self._config.hidden_size, *self._pixels)
        weight = weight.sum(2) if weight.ndim == 5 else weight
        weight = self._by_channel(weight) if weight.ndim == FLAT_DIMS else weight.flatten(1)
        return self._linear_of(weight, name, has_bias=self._family.has_patch_bias)

    @property
    def _pixels(self) -> tuple[int, ...]:
        """Return the shape of a patch, as it is stored."""
        size, family = self._config.patch_size, self._family
        frames = (FRAMES,) if family.is_folded_in_time else ()
        stored = self._tensors.found.get(
            f"{self._tensors.in_tower(self._names.patches)}.weight", ()
        )
        pixels = (NUM_CHANNELS, *frames, size, size)
        is_flat = family.has_flat_patches and len(stored) == FLAT_DIMS
        return (math.prod(pixels),) if is_flat else pixels

    def _pixel_norm(self) -> AnyNorm | None:
        norm = self._optional_norm(self._names.pixel_norm, math.prod(self._pixels))
        if norm is None:
            return None
        assert isinstance(norm, LayerNorm)
        assert norm.bias is not None
        weight, bias = self._by_channel(torch.stack((norm.weight, norm.bias)))
        return LayerNorm(weight, bias, norm.epsilon)

    def _by_channel(self, numbers: Tensor) -> Tensor:
        """Return rows of numbers for each pixel, channel by channel, that are stored by pixel."""
        size = self._config.patch_size
        pixels: Tensor = numbers.unflatten(1, (size, size, NUM_CHANNELS))
        return pixels.permute(0, 3, 1, 2).flatten(1)

    def _positions(self) -> Tensor | None:
        config, name = self._config, self._names.positions
        if not name:
            return None
        is_by_axis = config.positions is Positions.AXES
        places = (2, config.position_side) if is_by_axis else (config.position_side**2,)
        is_by_place = self._family.has_positions_by_place
        places = places[::-1] if is_by_place else places
        table = self._loader.vector(self._tensors.in_tower(name), *places, config.hidden_size)
        return table.transpose(0, 1) if is_by_place else table

    def _layer(self, index: int) -> TowerLayer:
        names, order, config = self._names, self._head_order(), self._config
        hidden = config.hidden_size

        def full(name: str) -> str:
            return self._tensors.in_layer(index, name)

        def linear(
            parts: Sequence[str],
            rows: int,
            columns: int,
            has_bias: bool,
            orders: Sequence[Sequence[int]] = (),
        ) -> Linear:
            if self._config.is_clipped:
                stacks = [Stack([part], [rows], columns, has_bias) for part in parts]
                return self._clipped(index, stacks, orders)
            first = [row for at, own in enumerate(orders) for row in _shifted(own, at * len(own))]
            stored = list(map(full, parts))
            stack = Stack(stored, [rows] * len(parts), columns, has_bias, first or None)
            return self._loader.linear(stack)

        def norm(name: str) -> AnyNorm:
            return self._norm(full(name), config.norm, hidden)

        is_biased, has_mlp_bias = self._family.has_attention_bias, self._family.has_mlp_bias
        orders = [] if order is None else 2 * [repeat_order(order, config.num_heads)]
        return TowerLayer(
            attention_norm=norm(names.attention_norm),
            qkv=linear(names.qkv, 3 * hidden // len(names.qkv), hidden, is_biased, orders),
            head_norms=self._head_norms(list(map(full, names.head_norms)), order),
            output=linear([names.output], hidden, hidden, is_biased),
            output_norm=norm(names.output_norm) if names.output_norm else None,
            mlp_norm=norm(names.mlp_norm),
            up=linear(names.up, config.mlp_size, hidden, has_mlp_bias),
            down=linear([names.down], hidden, config.mlp_size, has_mlp_bias),
            down_norm=norm(names.down_norm) if names.down_norm else None,
        )

    def _clipped(
        self, index: int, stacks: Sequence[Stack], orders: Sequence[Sequence[int]]
    ) -> ClippedLinears:
        in_layer = self._tensors.in_layer
        linears, inputs, outputs = [], [], []
        for stack, order in zip_longest(stacks, orders):
            [part] = stack.names
            own = replace(stack, names=[in_layer(index, part)], order=order)
            linears.append(self._loader.linear(own))
            bounds = [
                self._loader.vector(in_layer(index, bound))
                for bound in self._tensors.bounds_of(part)
            ]
            inputs.append(bounds[:2])
            outputs.append(bounds[2:])
        return ClippedLinears(linears, inputs, outputs)

    def _head_order(self) -> list[int] | None:
        """Return the stored dimension of each of a head; None: they are the same.

        Rotation takes pairs from the halves of a head: those of rows, then those of columns.
        """
        if not self._family.is_rope_split:
            return None
        by_column, by_row = (
            torch.arange(self._config.head_dim).view(2, 2, -1).transpose(0, 1).unbind(1)
        )
        return torch.cat((by_row, by_column), dim=1).flatten().tolist()

    def _head_norms(self, names: Sequence[str], order: Sequence[int] | None) -> list[AnyNorm]:
        """Return those of queries, keys and values. Queries undo the scale of attention."""
        if not names:
            return []
        config, is_scaled = self._config, self._family.is_attention_scaled
        factors = (1.0 if is_scaled else math.sqrt(config.head_dim), 1.0)
        weights = [
            self._loader.vector(f"{name}.weight", config.head_dim) * factor
            for name, factor in zip(names, factors, strict=True)
        ]
        if order is not None:
            weights = [weight[order] for weight in weights]
        weights.append(torch.ones_like(weights[0]))
        return [Norm(weight, config.norm_epsilon, rounds_once=True) for weight in weights]

    def _standardization(self) -> Standardization | None:
        if not self._config.is_standardized:
            return None
        names = map(self._tensors.in_tower, self._names.standardization)
        hidden = self._config.hidden_size
        return Standardization(*(self._loader.vector(name, hidden) for name in names))

    def _projector(
        self, names: ProjectorNames, config: ProjectorConfig, level: int | None = None
    ) -> ProjectorWeights:
        stored = [self._tensors.in_projector(name, level) for name in names.linears]
        columns = [self._config.merged_size, *config.sizes]
        norm = self._projector_norm(names, config, level) if config.norm is not None else None
        shapes = list(zip(config.sizes, columns, strict=False))
        linears = [
            self._loader.linear(Stack([name], [rows], columns, config.has_bias))
            for name, (rows, columns) in zip(stored[1:], shapes[1:], strict=True)
        ]
        has_bias = config.has_bias and self._family.has_first_bias
        first = self._first_linear(names, stored[0], *shapes[0], has_bias=has_bias)
        return ProjectorWeights(norm, [first, *linears])

    def _projector_norm(
        self, names: ProjectorNames, config: ProjectorConfig, level: int | None
    ) -> AnyNorm:
        merged, epsilon = self._config.merged_size, config.norm_epsilon
        if names.norm and config.norm is not None:
            size = merged if config.norms_merged else self._config.hidden_size
            name = self._tensors.in_projector(names.norm, level)
            return self._norm(name, config.norm, size, epsilon)
        return replace(self._loader.unweighted_norm(merged), epsilon=epsilon)

    def _first_linear(
        self, names: ProjectorNames, name: str, rows: int, columns: int, *, has_bias: bool
    ) -> Linear:
        if names.is_transposed:
            return self._linear_of(self._loader.vector(name, columns, rows).T, name)
        if not names.is_by_feature:
            return self._loader.linear(Stack([name], [rows], columns, has_bias))
        weight = self._loader.vector(f"{name}.weight", rows, columns)
        by_patch = weight.unflatten(1, (self._config.hidden_size, -1)).transpose(1, 2)
        return self._linear_of(by_patch.flatten(1), name, has_bias=has_bias)

    def _linear_of(self, weight: Tensor, name: str, *, has_bias: bool = False) -> Linear:
        """Return a linear layer of a weight that is not in the files as it is."""
        bias = self._loader.vector(f"{name}.bias", len(weight)) if has_bias else None
        return self._loader.linear_of(weight, bias)

    def _optional_norm(self, name: str, size: int | None = None) -> AnyNorm | None:
        if not name:
            return None
        size = self._config.hidden_size if size is None else size
        return self._norm(self._tensors.in_tower(name), self._config.norm, size)

    def _norm(self, name: str, kind: NormKind, size: int, epsilon: float | None = None) -> AnyNorm:
        epsilon = self._config.norm_epsilon if epsilon is None else epsilon
        if kind is NormKind.RMS:
            return self._loader.gated_norm(f"{name}.weight", size, epsilon)
        weight = self._loader.vector(f"{name}.weight", size)
        if kind is NormKind.LAYER:
            return LayerNorm(weight, self._loader.vector(f"{name}.bias", size), epsilon)
        offset = 1 if kind is NormKind.OFFSET_RMS else 0
        return Norm(weight + offset, epsilon, rounds_once=True)


def _shifted(order: Sequence[int], by: int) -> list[int]:
    return [row + by for row in order]
