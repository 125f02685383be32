"""Choice of a model's pooling, from the settings and its files."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.pooling import Pooling, PoolingKind


def choose_pooling(name: str, checkpoint: Checkpoint, own: Pooling | None) -> Pooling | None:
    """Return the model's own pooling, as classifiers have, or that of the settings or the files."""
    if own is not None or name == "none":
        return own
    return checkpoint.read_pooling() if name == "auto" else Pooling(PoolingKind(name))
