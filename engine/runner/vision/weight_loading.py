"""Loads the weights of a vision tower."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from baton.checkpoint.checkpoint import Shape, Tensors
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import NormKind
from baton.engine.runner.vision.table import ProjectorNames
from baton.engine.runner.vision.tensor_names import TowerTensors, check_tower_tensors
from baton.engine.runner.vision.weights import (
    AnyNorm,
    ProjectorWeights,
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
            patches=self._patches(in_tower(names.patches)),
            positions=self._loader.vector(in_tower(names.positions)) if names.positions else None,
            input_norm=self._optional_norm(names.input_norm),
            layers=[self._layer(index) for index in range(config.num_layers)],
            final_norm=self._optional_norm(names.final_norm),
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
        return self._linear_of(weight.flatten(1), name)

    def _layer(self, index: int) -> TowerLayer:
        names = self._names

        def full(name: str) -> str:
            return self._tensors.in_layer(index, name)

        def linear(*parts: str) -> Linear:
            stored = list(map(full, parts))
            return self._loader.linear(stored, f"{stored[0]}.bias" in self._shapes)

        return TowerLayer(
            attention_norm=self._norm(full(names.attention_norm), self._config.norm),
            qkv=linear(*names.qkv),
            output=linear(names.output),
            mlp_norm=self._norm(full(names.mlp_norm), self._config.norm),
            up=linear(*names.up),
            down=linear(names.down),
        )

    def _projector(self, names: ProjectorNames, level: int | None = None) -> ProjectorWeights:
        config = self._config.projector
        stored = [self._tensors.in_projector(name, level) for name in names.linears]
        norm = None
        if config.norm is not None:
            name = self._tensors.in_projector(names.norm, level)
            norm = self._norm(name, config.norm, config.norm_epsilon)
        linears = [self._loader.linear([name], self._has_bias(name)) for name in stored[1:]]
        return ProjectorWeights(norm, [self._first_linear(names, stored[0]), *linears])

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
        return Norm(weight.to(self._target.dtype), epsilon)
