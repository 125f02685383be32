"""Plot of token gaps and first tokens under long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.plots import picture
from benchmarks.peers.interference import FigureRow, Interference

OWN, OTHER = "tab:blue", "tab:grey"
SMALL = {"fontsize": 8}
MILLIS = 1e3
TICKS = (20, 50, 100, 200, 500, 1000, 2000)


def draw(bench: Interference, rows: Sequence[FigureRow], path: Path) -> None:
    """Draw the token gaps, and next to them the times to first token."""
    with picture(path, 10, 1.2 + 0.42 * len(rows), columns=2) as [[gaps, first]]:
        draw_gaps(gaps, rows)
        _draw_first_tokens(first, bench, rows)


def draw_gaps(axes: Any, rows: Sequence[FigureRow]) -> None:
    """Draw a bar from the median to the 99th percentile of the gaps for each engine."""
    places = range(len(rows))
    for place, row in enumerate(rows):
        found = row.figures
        ends_ms = [found.itl_p50_ms, found.itl_p99_ms]
        axes.plot(ends_ms, [place] * 2, color=_colour(row), linewidth=5)
        _annotate(axes, found.itl_p50_ms, place, -5)
        _annotate(axes, found.itl_p99_ms, place, 5)
    axes.set(xscale="log", title="gap between tokens, ms: median to p99")
    axes.set_yticks(places, [row.engine for row in rows])
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xticks(TICKS)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()


def _draw_first_tokens(axes: Any, bench: Interference, rows: Sequence[FigureRow]) -> None:
    for place, row in enumerate(rows):
        first_ms = row.figures.first_token_p50_s * MILLIS
        axes.barh(place, first_ms, color=_colour(row), height=0.45)
        _annotate(axes, first_ms, place, 4)
    axes.set(title=f"first token of a {bench.prompt_tokens}-token prompt, ms")
    axes.set_yticks([])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:.0f}")


def _annotate(axes: Any, at_ms: float, place: int, offset: int) -> None:
    axes.annotate(
        f"{at_ms:.0f}",
        (at_ms, place),
        (offset, 0),
        textcoords="offset points",
        ha="right" if offset < 0 else "left",
        va="center",
        **SMALL,
    )


def _colour(row: FigureRow) -> str:
    return OWN if row.engine.startswith("baton") else OTHER
