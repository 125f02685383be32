"""Helpers of all plots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidConfig


def need_matplotlib() -> Any:
    """Import matplotlib; call it before measuring. Raises InvalidConfig if it is missing."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as missing:
        raise InvalidConfig("plots need matplotlib: pip install 'baton[plots]'") from missing
    plt.switch_backend("agg")  # no display needed
    return plt


@contextmanager
def drawn(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield a figure, which is saved in the common style when the block ends."""
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
    """Yield the axes of a figure as rows; it is saved when the block ends."""
    with drawn(path, width, height) as figure:
        yield figure.subplots(rows, columns, squeeze=False)
