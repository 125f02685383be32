"""The picture of what long prompts do to answers under way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.bench.interference import Interference, Row
from baton.bench.plotting import picture

OWN, OTHER = "tab:blue", "tab:grey"
SMALL = {"fontsize": 8}
MILLIS = 1e3
TICKS = (20, 50, 100, 200, 500, 1000, 2000)


def draw(what: Interference, rows: Sequence[Row], path: Path) -> None:
    """Gaps between tokens from the median to the 99th percentile, and the first token beside."""
    with picture(path, 10, 1.2 + 0.42 * len(rows), columns=2) as [[gaps, first]]:
        places = range(len(rows))
        for place, row in enumerate(rows):
            found = row.figures
            colour = OWN if row.engine.startswith("baton") else OTHER
            gaps.plot([found.itl_p50_ms, found.itl_p99_ms], [place] * 2, color=colour, linewidth=5)
            ends = ((found.itl_p50_ms, "right"), (found.itl_p99_ms, "left"))
            for at_ms, side in ends:
                beside = -5 if side == "right" else 5
                gaps.annotate(
                    f"{at_ms:.0f}",
                    (at_ms, place),
                    (beside, 0),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    **SMALL,
                )
            first.barh(place, found.first_token_p50_s * MILLIS, color=colour, height=0.45)
            first.annotate(
                f"{found.first_token_p50_s * MILLIS:.0f}",
                (found.first_token_p50_s * MILLIS, place),
                (4, 0),
                textcoords="offset points",
                va="center",
                **SMALL,
            )
        gaps.set(xscale="log", title="token to token, ms: median to p99")
        gaps.set_yticks(places, [row.engine for row in rows])
        gaps.margins(x=0.2)
        gaps.invert_yaxis()
        first.set(title=f"first of a {what.prompt_tokens} token prompt, ms")
        first.set_yticks([])
        first.margins(x=0.15)
        first.invert_yaxis()
        gaps.set_xticks(TICKS)
        for axes in (gaps, first):
            axes.xaxis.set_major_formatter("{x:.0f}")
        gaps.minorticks_off()
