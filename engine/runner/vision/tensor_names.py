"""Names and shapes of the tensors of a vision tower and its projectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.core.media import NUM_CHANNELS
from baton.engine.runner.vision.config import NormKind, Positions, ProjectorConfig, VisionConfig
from baton.engine.runner.vision.table import VISION_FAMILIES, ProjectorNames

FRAMES = 2  # in which a patch of a video is stored
FLAT_DIMS = 2
BOUNDS = ("input_min", "input_max", "output_min", "output_max")

Shapes = Iterator[tuple[str, Shape]]


class TowerTensors:
    """Names of a tower's tensors, as a folder spells them that has the tensors `found`."""

    def __init__(self, config: VisionConfig, found: Mapping[str, Shape]) -> None:
        self.config = config
        self._found = found
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

    def bounds_of(self, linear: str) -> tuple[str, ...]:
        """Return the names of a clipped layer's least and largest input, then output."""
        prefix = linear.removesuffix(self.names.clipped_end)
        return tuple(f"{prefix}.{end}" for end in BOUNDS)

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes())

    def _shapes(self) -> Shapes:
        config, names = self.config, self.names
        yield from self._patch_shapes()
        if names.positions:
            is_by_axis = config.positions is Positions.AXES
            places = (2, config.position_side) if is_by_axis else (config.position_side**2,)
            places = places[::-1] if self.family.has_positions_by_place else places
            yield self.in_tower(names.positions), (*places, config.hidden_size)
        for norm in filter(None, (names.patch_norm, names.input_norm, names.final_norm)):
            yield from _norm(self.in_tower(norm), config.norm, config.hidden_size)
        if config.is_standardized:
            for name in names.standardization:
                yield self.in_tower(name), (config.hidden_size,)
        for index in range(config.num_layers):
            for name, shape in self._layer_shapes():
                yield self.in_layer(index, name), shape
        yield from self._projector_shapes(names.projector, config.projector, None)
        if names.level_projector is not None and config.level_projector is not None:
            for level in range(len(config.level_layers)):
                own, how = names.level_projector, config.level_projector
                yield from self._projector_shapes(own, how, level)

    def _patch_shapes(self) -> Shapes:
        config, family = self.config, self.family
        frames = (FRAMES,) if family.is_folded_in_time else ()
        pixels: Shape = (NUM_CHANNELS, *frames, config.patch_size, config.patch_size)
        name = self.in_tower(self.names.patches)
        if family.has_flat_patches and len(self._found.get(f"{name}.weight", ())) == FLAT_DIMS:
            pixels = (math.prod(pixels),)
        yield from _affine(name, (config.hidden_size, *pixels), family.has_patch_bias)
        if self.names.pixel_norm:
            yield from _norm(self.in_tower(self.names.pixel_norm), config.norm, math.prod(pixels))

    def _layer_shapes(self) -> Shapes:
        config, names, hidden = self.config, self.names, self.config.hidden_size
        post_norms = filter(None, (names.output_norm, names.down_norm))
        for norm in (names.attention_norm, names.mlp_norm, *post_norms):
            yield from _norm(norm, config.norm, hidden)
        for norm in names.head_norms:
            yield from _norm(norm, config.norm, config.head_dim)
        if config.is_clipped:
            for linear in (*names.qkv, names.output, *names.up, names.down):
                for bound in self.bounds_of(linear):
                    yield bound, ()
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
        if config.norm is not None and names.norm:
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
