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
def drawn(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure, written when the block ends. All of its axes are dressed alike."""
    plt = need_matplotlib()
    figure = plt.figure(figsize=(width, height), layout="constrained")
    try:
        yield figure
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


@contextmanager
def picture(
    path: Path, width: float, height: float, *, rows: int = 1, columns: int = 1
) -> Iterator[Any]:
    """Such a figure's axes, in rows."""
    with drawn(path, width, height) as figure:
        yield figure.subplots(rows, columns, squeeze=False)
