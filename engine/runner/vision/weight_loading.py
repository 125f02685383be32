"""Loads the weights of a vision tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Shape, Tensors
from baton.core.media import NUM_CHANNELS
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.rope import repeat_order
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import NormKind
from baton.engine.runner.vision.table import ProjectorNames
from baton.engine.runner.vision.tensor_names import (
    FLAT_DIMS,
    TowerTensors,
    check_tower_tensors,
)
from baton.engine.runner.vision.weights import (
    AnyNorm,
    ClippedLinears,
    ProjectorWeights,
    Standardization,
    TowerLayer,
    TowerWeights,
)
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader


def load_tower_weights(
    tensors: TowerTensors,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> TowerWeights:
    """Check and load them. Raises ModelError if the files do not fit the configuration."""
    check_tower_tensors(tensors, files)
    # Four bits cost a tower more than its decoder, and packed towers are not kept on disk.
    quantize = "none" if target.quantize == "none" else "int8"
    target = replace(target, quantize=quantize, cached=None, importance={})
    shapes = tensors.shapes()
    loader = TensorLoader(shapes, files, target, on_progress)
    return _WeightLoader(tensors, shapes, loader, target).load()


class _WeightLoader:
    def __init__(
        self,
        tensors: TowerTensors,
        shapes: dict[str, Shape],
        loader: TensorLoader,
        target: LoadTarget,
    ) -> None:
        self._tensors = tensors
        self._config = tensors.config
        self._names = tensors.names
        self._shapes = shapes
        self._loader = loader
        self._target = target

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
            projector=self._projector(names.projector),
            level_projectors=[
                self._projector(names.level_projector, level)
                for level in levels
                if names.level_projector is not None
            ],
        )

    def _patches(self, name: str) -> Linear:
        """Load the convolution over patches. A picture is a video whose frames are the same."""
        weight = self._loader.vector(f"{name}.weight")
        weight = weight.sum(2) if weight.ndim == 5 else weight
        weight = self._by_channel(weight) if weight.ndim == FLAT_DIMS else weight.flatten(1)
        return self._linear_of(weight, name)

    def _pixel_norm(self) -> AnyNorm | None:
        norm = self._optional_norm(self._names.pixel_norm)
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
        if not self._names.positions:
            return None
        table = self._loader.vector(self._tensors.in_tower(self._names.positions))
        return table.transpose(0, 1) if self._tensors.family.has_positions_by_place else table

    def _layer(self, index: int) -> TowerLayer:
        names, order = self._names, self._head_order()

        def full(name: str) -> str:
            return self._tensors.in_layer(index, name)

        def linear(*parts: str, orders: Sequence[Sequence[int]] = ()) -> Linear:
            if self._config.is_clipped:
                return self._clipped(index, parts, orders)
            stored = list(map(full, parts))
            first = [row for at, own in enumerate(orders) for row in _shifted(own, at * len(own))]
            return self._loader.linear(stored, self._has_bias(stored[0]), first or None)

        def norm(name: str) -> AnyNorm:
            return self._norm(full(name), self._config.norm)

        rows = [] if order is None else 2 * [repeat_order(order, self._config.num_heads)]
        return TowerLayer(
            attention_norm=norm(names.attention_norm),
            qkv=linear(*names.qkv, orders=rows),
            head_norms=self._head_norms(list(map(full, names.head_norms)), order),
            output=linear(names.output),
            output_norm=norm(names.output_norm) if names.output_norm else None,
            mlp_norm=norm(names.mlp_norm),
            up=linear(*names.up),
            down=linear(names.down),
            down_norm=norm(names.down_norm) if names.down_norm else None,
        )

    def _clipped(
        self, index: int, parts: Sequence[str], orders: Sequence[Sequence[int]]
    ) -> ClippedLinears:
        in_layer = self._tensors.in_layer
        linears, inputs, outputs = [], [], []
        for part, order in zip_longest(parts, orders):
            name = in_layer(index, part)
            linears.append(self._loader.linear([name], self._has_bias(name), order))
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
        if not self._tensors.family.is_rope_split:
            return None
        by_column, by_row = (
            torch.arange(self._config.head_dim).view(2, 2, -1).transpose(0, 1).unbind(1)
        )
        return torch.cat((by_row, by_column), dim=1).flatten().tolist()

    def _head_norms(self, names: Sequence[str], order: Sequence[int] | None) -> list[AnyNorm]:
        """Return those of queries, keys and values. Queries undo the scale of attention."""
        if not names:
            return []
        config, is_scaled = self._config, self._tensors.family.is_attention_scaled
        factors = (1.0 if is_scaled else math.sqrt(config.head_dim), 1.0)
        weights = [
            self._loader.vector(f"{name}.weight") * factor
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
        return Standardization(*map(self._loader.vector, names))

    def _projector(self, names: ProjectorNames, level: int | None = None) -> ProjectorWeights:
        config = self._config.projector
        stored = [self._tensors.in_projector(name, level) for name in names.linears]
        norm = None
        if config.norm is not None:
            norm = self._projector_norm(names, level, config.norm, config.norm_epsilon)
        linears = [self._loader.linear([name], self._has_bias(name)) for name in stored[1:]]
        return ProjectorWeights(norm, [self._first_linear(names, stored[0]), *linears])

    def _projector_norm(
        self, names: ProjectorNames, level: int | None, kind: NormKind, epsilon: float
    ) -> AnyNorm:
        if names.norm:
            return self._norm(self._tensors.in_projector(names.norm, level), kind, epsilon)
        weight = torch.ones(self._config.merged_size, device=self._target.device)
        return Norm(weight, epsilon, rounds_once=True)

    def _first_linear(self, names: ProjectorNames, name: str) -> Linear:
        if names.is_transposed:
            return self._linear_of(self._loader.vector(name).T, name)
        if not names.is_by_feature:
            return self._loader.linear([name], self._has_bias(name))
        weight = self._loader.vector(f"{name}.weight")
        by_patch = weight.unflatten(1, (self._config.hidden_size, -1)).transpose(1, 2)
        return self._linear_of(by_patch.flatten(1), name)

    def _linear_of(self, weight: Tensor, name: str) -> Linear:
        """Return a linear layer of a weight that is not in the files as it is."""
        bias, dtype = None, self._target.dtype
        if self._has_bias(name):
            bias = self._loader.vector(f"{name}.bias").to(dtype)
        return self._target.parts.ops.linear(weight.to(dtype).contiguous(), bias)

    def _has_bias(self, name: str) -> bool:
        return f"{name}.bias" in self._shapes

    def _optional_norm(self, name: str) -> AnyNorm | None:
        return self._norm(self._tensors.in_tower(name), self._config.norm) if name else None

    def _norm(self, name: str, kind: NormKind, epsilon: float | None = None) -> AnyNorm:
        epsilon = self._config.norm_epsilon if epsilon is None else epsilon
        weight = self._loader.vector(f"{name}.weight")
        if kind is NormKind.LAYER:
            return LayerNorm(weight, self._loader.vector(f"{name}.bias"), epsilon)
        if kind is NormKind.OFFSET_RMS:
            return Norm(weight + 1, epsilon, rounds_once=True)
        if kind is NormKind.WIDE_RMS:
            return Norm(weight, epsilon, rounds_once=True)
        return Norm(weight.to(self._target.dtype), epsilon)


def _shifted(order: Sequence[int], by: int) -> list[int]:
    return [row + by for row in order]
