"""Choice of a model's pooling, from the settings and its files."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.pooling import Pooling, PoolingKind


def choose_pooling(name: str, checkpoint: Checkpoint, num_labels: int) -> Pooling | None:
    """Return the pooling that the settings name, or that of the files.

    A classifier scores the last token.
    """
    if num_labels:
        return Pooling(PoolingKind.LAST, normalizes=False, num_labels=num_labels)
    if name == "none":
        return None
    if name == "auto":
        return checkpoint.read_pooling()
    return Pooling(PoolingKind(name))
