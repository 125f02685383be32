"""Table of towers: what encodes pictures in front of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.engine.runner.batch.encodings import PictureEncoder
from baton.engine.runner.vision.unloaded_tower import read_vision_tower
from baton.engine.runner.weights.tensor_loading import LoadTarget


class UnloadedTower(Protocol):
    """Tower of a model whose weights are not loaded yet."""

    @property
    def settings(self) -> str:
        """All settings that its encodings depend on."""
        ...

    @property
    def encoding_size(self) -> int:
        """Numbers of a row of an encoding."""
        ...

    def num_rows(self, height: int, width: int) -> int:
        """Return the rows of the encoding of a picture. Raises ValueError for a wrong size."""
        ...

    def load(self, files: Tensors, target: LoadTarget) -> PictureEncoder | None:
        """Return the tower; None if the files have none. Raises ModelError."""
        ...


ReadTower = Callable[[Checkpoint], UnloadedTower | None]
TOWERS: Sequence[ReadTower] = (read_vision_tower,)


def read_tower(checkpoint: Checkpoint) -> UnloadedTower | None:
    """Return the tower of a model; None for a model of text alone.

    Raises ModelError for a tower that cannot be used here. Its text can still be served.
    """
    found = (read(checkpoint) for read in TOWERS)
    return next((tower for tower in found if tower is not None), None)
