"""Names and shapes of the tensors of a vision tower and its projectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.core.media import NUM_CHANNELS
from baton.engine.runner.vision.config import NormKind, ProjectorConfig, VisionConfig
from baton.engine.runner.vision.table import VISION_FAMILIES, ProjectorNames

FRAMES = 2  # in which a patch of a video is stored

Shapes = Iterator[tuple[str, Shape]]


class TowerTensors:
    """Names of a tower's tensors, as a folder spells them that has the tensors `found`."""

    def __init__(self, config: VisionConfig, found: Mapping[str, Shape]) -> None:
        self.config = config
        self.family = VISION_FAMILIES[config.architecture]
        self.names = names = self.family.names
        self._tower = _prefix(names.towers, names.patches, found)
        self._projector = _prefix(names.projectors, names.projector.linears[0], found)

    def in_tower(self, name: str) -> str:
        return f"{self._tower}{name}"

    def in_layer(self, index: int, name: str) -> str:
        return f"{self._tower}{self.names.layers}.{index}.{name}"

    def in_projector(self, name: str, level: int | None = None) -> str:
        """Return the name of a projector's tensor, that of a level of DeepStack if given."""
        return f"{self._projector}{name.format(level=level)}"

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor belongs to the decoder, or is not needed for pictures."""
        if self.names.ignored and name.startswith(tuple(map(self.in_tower, self.names.ignored))):
            return True
        return not name.startswith((self._tower, self._projector))

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes())

    def _shapes(self) -> Shapes:
        config, names = self.config, self.names
        frames = (FRAMES,) if self.family.is_folded_in_time else ()
        patch = (config.hidden_size, NUM_CHANNELS, *frames, config.patch_size, config.patch_size)
        yield from _affine(self.in_tower(names.patches), patch, self.family.has_patch_bias)
        if names.positions:
            yield self.in_tower(names.positions), (config.position_side**2, config.hidden_size)
        for norm in filter(None, (names.input_norm, names.final_norm)):
            yield from _norm(self.in_tower(norm), config.norm, config.hidden_size)
        for index in range(config.num_layers):
            for name, shape in self._layer_shapes():
                yield self.in_layer(index, name), shape
        yield from self._projector_shapes(names.projector, config.projector, None)
        if names.level_projector is not None and config.level_projector is not None:
            for level in range(len(config.level_layers)):
                own, how = names.level_projector, config.level_projector
                yield from self._projector_shapes(own, how, level)

    def _layer_shapes(self) -> Shapes:
        config, names, hidden = self.config, self.names, self.config.hidden_size
        for norm in (names.attention_norm, names.mlp_norm):
            yield from _norm(norm, config.norm, hidden)
        for name in names.qkv:
            shape = (3 * hidden // len(names.qkv), hidden)
            yield from _affine(name, shape, self.family.has_attention_bias)
        yield from _affine(names.output, (hidden, hidden), self.family.has_attention_bias)
        for name in names.up:
            yield from _affine(name, (config.mlp_size, hidden), self.family.has_mlp_bias)
        yield from _affine(names.down, (hidden, config.mlp_size), self.family.has_mlp_bias)

    def _projector_shapes(
        self, names: ProjectorNames, config: ProjectorConfig, level: int | None
    ) -> Shapes:
        hidden, merged = self.config.hidden_size, self.config.merged_size
        if config.norm is not None:
            size = merged if config.norms_merged else hidden
            yield from _norm(self.in_projector(names.norm, level), config.norm, size)
        columns = merged
        for index, (name, rows) in enumerate(zip(names.linears, config.sizes, strict=True)):
            full = self.in_projector(name, level)
            if names.is_transposed:
                yield full, (columns, rows)
            else:
                has_bias = config.has_bias and (index > 0 or self.family.has_first_bias)
                yield from _affine(full, (rows, columns), has_bias)
            columns = rows


def check_tower_tensors(tensors: TowerTensors, files: Tensors) -> None:
    """Raise ModelError unless the files hold every tensor of the tower, and no other of it."""
    expected = {name: Expected(shape, FLOATS) for name, shape in tensors.shapes().items()}
    files.check(expected, tensors.is_ignored)


def _prefix(prefixes: Sequence[str], name: str, found: Mapping[str, Shape]) -> str:
    stored = (each for each in prefixes if {f"{each}{name}", f"{each}{name}.weight"} & set(found))
    return next(stored, prefixes[0])


def _affine(name: str, shape: Shape, has_bias: bool) -> Shapes:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]


def _norm(name: str, kind: NormKind, size: int) -> Shapes:
    yield from _affine(name, (size,), kind is NormKind.LAYER)
