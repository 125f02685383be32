"""What all plots share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import InvalidConfig


def need_matplotlib() -> Any:
    """Before anything is measured. Raises InvalidConfig if it is not there."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as missing:
        raise InvalidConfig("plots need matplotlib: pip install 'baton[plots]'") from missing
    plt.switch_backend("agg")  # a file needs no screen
    return plt


@contextmanager
def picture(
    path: Path, width: float, height: float, *, rows: int = 1, columns: int = 1
) -> Iterator[Any]:
    """Its axes, in rows; written when the block ends."""
    plt = need_matplotlib()
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    try:
        yield axes
        for one in axes.flat:
            one.spines[["top", "right"]].set_visible(False)
            one.grid(alpha=0.25)
            one.set_axisbelow(True)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)
