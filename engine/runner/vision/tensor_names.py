"""Names of the tensors of a vision tower and its projectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.checkpoint.checkpoint import Shape
from baton.engine.runner.vision.config import VisionConfig
from baton.engine.runner.vision.table import VISION_FAMILIES

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class TowerTensors:
    """Names of a tower's tensors, as a folder spells them that has the tensors `found`."""

    def __init__(self, config: VisionConfig, found: Mapping[str, Shape]) -> None:
        self.config = config
        self.found = found
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


def _prefix(prefixes: Sequence[str], name: str, found: Mapping[str, Shape]) -> str:
    stored = (each for each in prefixes if {f"{each}{name}", f"{each}{name}.weight"} & set(found))
    return next(stored, prefixes[0])
