"""Table of the ways in which models take images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.checkpoint.checkpoint import Checkpoint
from baton.router.pictures.families.table import read_format
from baton.router.pictures.plan import PictureFormat

ReadFormat = Callable[[Checkpoint], PictureFormat | None]
FORMATS: Sequence[ReadFormat] = (read_format,)


def find_format(checkpoint: Checkpoint) -> PictureFormat | None:
    """Return how a model takes images, or None for a model of text alone.

    Raises ModelError for a model whose images Baton cannot prepare. Its text can be served.
    """
    found = (read(checkpoint) for read in FORMATS)
    return next((each for each in found if each is not None), None)
