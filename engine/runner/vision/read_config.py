"""Reads the architecture of a vision tower from config.json, and how its pixels are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.read_config import MAX_LAYERS, read_model_config
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.vision.config import (
    PixelScaling,
    Positions,
    ProjectorConfig,
    TowerActivation,
    VisionConfig,
)
from baton.engine.runner.vision.table import VISION_FAMILIES, ProjectorNames, VisionFamily

NUM_CHANNELS = 3


def read_vision_config(checkpoint: Checkpoint) -> VisionConfig | None:
    """Read and check the fields. Return None for a model of text alone.

    Raises ModelError for an unknown tower, whose text can still be served.
    """
    raw = checkpoint.read_config()
    if not raw.has("vision_config"):
        return None
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    family = VISION_FAMILIES.get(name)
    if family is None:
        known = ", ".join(VISION_FAMILIES)
        raise raw.wrong("architectures", f"must name one of {known} for pictures to be seen")
    fields = raw.inner("vision_config").with_defaults(family.defaults)
    scaling = _read_scaling(family, checkpoint.read_image_processor())
    return _Reader(name, family, raw, fields, read_model_config(checkpoint)).read(scaling)


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str
    family: VisionFamily
    raw: JsonFields
    fields: JsonFields
    decoder: ModelConfig

    def read(self, scaling: PixelScaling) -> VisionConfig:
        family, fields = self.family, self.fields
        self._check()
        num_layers = self._num_layers()
        merge_size, levels = family.merge_size(self.raw, fields), self._levels(num_layers)
        return VisionConfig(
            architecture=self.name,
            num_layers=num_layers,
            hidden_size=self._hidden_size(),
            num_heads=self._num_heads(),
            mlp_size=self._mlp_size(),
            patch_size=self._patch_size(),
            merge_size=merge_size,
            picture_size=self._picture_size(),
            scaling=scaling,
            positions=family.positions,
            position_side=self._position_side(),
            rope_theta=self._rope_theta() if family.has_rope else None,
            is_rope_alternating=family.is_rope_alternating,
            norm=family.norm,
            norm_epsilon=self._epsilon(family.norm_epsilon),
            is_clipped=bool(family.names.clipped_end) and fields.flag("use_clipped_linears", False),
            activation=self._activation(fields, family.fields.activation),
            is_gated=family.is_gated,
            merge=family.merge,
            token_scale=math.sqrt(self._hidden_size()) if family.scales_tokens else 1.0,
            is_standardized=bool(family.names.standardization)
            and fields.flag("standardize", False),
            projector=self._projector(family.names.projector, norms_merged=family.norms_merged),
            window_size=self._window_size(merge_size) if family.has_windows else None,
            full_layers=frozenset(self._layer_list("fullatt_block_indexes", num_layers)),
            level_layers=levels,
            level_projector=self._level_projector() if levels else None,
        )

    def _check(self) -> None:
        """Refuse what changes the computation and is not supported."""
        fields, raw = self.fields, self.raw
        for name in ("num_channels", "in_channels", "in_chans"):
            if fields.positive_int(name, NUM_CHANNELS) != NUM_CHANNELS:
                raise fields.wrong(name, f"must be {NUM_CHANNELS}")
        if raw.has("vision_feature_layer") and raw.get("vision_feature_layer") != -1:
            raise raw.wrong("vision_feature_layer", "must be -1")
        output_size = self.family.fields.output_size
        if output_size and fields.positive_int(output_size) != self.decoder.hidden_size:
            expected = f"must be the hidden size of the text model ({self.decoder.hidden_size})"
            raise fields.wrong(output_size, expected)

    def _hidden_size(self) -> int:
        return self.fields.positive_int(self.family.fields.hidden_size)

    def _patch_size(self) -> int:
        factor = self.family.fields.patch_edges
        size = self.fields.positive_int("patch_size")
        return size * self.fields.positive_int(factor) if factor else size

    def _mlp_size(self) -> int:
        if not self.family.fields.num_layers:
            return 0
        ratio = self.family.fields.mlp_ratio
        if ratio:
            return int(self._hidden_size() * self.fields.number(ratio, above=0))
        return self.fields.positive_int("intermediate_size")

    def _num_layers(self) -> int:
        name = self.family.fields.num_layers
        if not name:
            return 0
        num_layers = self.fields.positive_int(name)
        if num_layers > MAX_LAYERS:
            raise self.fields.wrong(name, f"must be at most {MAX_LAYERS}")
        return num_layers

    def _num_heads(self) -> int:
        if not self.family.fields.num_layers:
            return 1
        name, hidden_size = self.family.fields.num_heads, self._hidden_size()
        num_heads = self.fields.positive_int(name)
        # RoPE rotates pairs of two dimensions by rows, and as many by columns.
        divisor = num_heads * (4 if self.family.has_rope else 1)
        if hidden_size % divisor:
            raise self.fields.wrong(name, f"must divide the size {hidden_size} into heads")
        head_dim = hidden_size // num_heads
        if self.fields.positive_int("head_dim", head_dim) != head_dim:
            raise self.fields.wrong("head_dim", f"must be {head_dim}")
        if self.fields.positive_int("num_key_value_heads", num_heads) != num_heads:
            raise self.fields.wrong("num_key_value_heads", f"must be {num_heads}")
        return num_heads

    def _picture_size(self) -> int | None:
        is_fixed = self.family.positions is Positions.FIXED
        return self.fields.positive_int("image_size") if is_fixed else None

    def _position_side(self) -> int:
        fields = self.fields
        if self.family.positions is Positions.NONE:
            return 0
        if self.family.fields.position_side:
            return fields.positive_int(self.family.fields.position_side)
        if self.family.positions is Positions.INTERPOLATED:
            return math.isqrt(fields.positive_int("num_position_embeddings"))
        return fields.positive_int("image_size") // fields.positive_int("patch_size")

    def _rope_theta(self) -> float:
        fields = self.fields
        if not fields.has("rope_parameters"):
            return fields.number("rope_theta", 10_000.0, above=1)
        rope = fields.inner("rope_parameters")
        if rope.has("rope_type") and rope.get("rope_type") not in ("axial", "default"):
            raise rope.wrong("rope_type", "must be 'axial'")
        return rope.number("rope_theta", 10_000.0, above=1)

    def _epsilon(self, epsilon: float | str) -> float:
        if epsilon == "":
            return self.decoder.norm.epsilon
        return self.fields.number(epsilon, above=0) if isinstance(epsilon, str) else epsilon

    def _activation(self, fields: JsonFields, name: str) -> TowerActivation:
        known = {each.value: each for each in TowerActivation}
        found = str(fields.get(name) or TowerActivation.GELU.value)
        if found not in known:
            raise fields.wrong(name, f"must be one of {', '.join(known)}")
        return known[found]

    def _projector(self, names: ProjectorNames, *, norms_merged: bool) -> ProjectorConfig:
        family, hidden_size = self.family, self._hidden_size()
        has_bias = family.has_projector_bias
        if isinstance(has_bias, str):
            has_bias = self.raw.flag(has_bias, False)
        merged = hidden_size * family.merge_size(self.raw, self.fields) ** 2
        sizes = {1: (), 2: (merged,), 3: (hidden_size, self.decoder.hidden_size)}
        return ProjectorConfig(
            norm=family.projector_norm,
            norm_epsilon=self._epsilon(family.projector_epsilon),
            norms_merged=norms_merged,
            sizes=(*sizes[len(names.linears)], self.decoder.hidden_size),
            has_bias=has_bias,
            activation=self._activation(self.raw, "projector_hidden_act"),
        )

    def _level_projector(self) -> ProjectorConfig:
        names = cast("ProjectorNames", self.family.names.level_projector)
        return self._projector(names, norms_merged=True)

    def _levels(self, num_layers: int) -> tuple[int, ...]:
        if self.family.names.level_projector is None:
            return ()
        return self._layer_list("deepstack_visual_indexes", num_layers)

    def _layer_list(self, name: str, num_layers: int) -> tuple[int, ...]:
        """Return those of the listed layers that the tower has, in order."""
        layers = self.fields.numbers(name) if self.fields.has(name) else ()
        if list(layers) != sorted({*map(int, layers)}):
            raise self.fields.wrong(name, "must list indices of layers in order")
        return tuple(int(layer) for layer in layers if layer < num_layers)

    def _window_size(self, merge_size: int) -> int:
        side = self.fields.positive_int("patch_size") * merge_size
        return max(1, self.fields.positive_int("window_size") // side)


def _read_scaling(family: VisionFamily, fields: JsonFields | None) -> PixelScaling:
    """Return how an image processor scales pixels, or how that of the family does."""
    if fields is None:
        return PixelScaling(1 / 255, family.mean, family.deviation)
    factor = fields.number("rescale_factor", 1 / 255, above=0)
    if not fields.flag("do_rescale", True):
        factor = 1.0
    mean, deviation = family.mean, family.deviation
    if fields.has("image_mean"):
        mean = _three_numbers(fields, "image_mean")
    if fields.has("image_std"):
        deviation = _three_numbers(fields, "image_std")
    if not fields.flag("do_normalize", not family.centres_pixels):
        mean, deviation = (0.0,) * NUM_CHANNELS, (1.0,) * NUM_CHANNELS
    if 0 in deviation:
        raise fields.wrong("image_std", "must not have a 0")
    if family.centres_pixels:
        mean = tuple(each + own / 2 for each, own in zip(mean, deviation, strict=True))
        deviation = tuple(own / 2 for own in deviation)
    return PixelScaling(factor, mean, deviation)


def _three_numbers(fields: JsonFields, name: str) -> tuple[float, ...]:
    numbers = fields.numbers(name)
    if len(numbers) != NUM_CHANNELS:
        raise fields.wrong(name, f"must be a list of {NUM_CHANNELS} numbers")
    return numbers
