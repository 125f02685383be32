"""Plot of goodput by latency limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.bench.plots import picture
from benchmarks.peers.frontier import Goodput, Sweep

STYLES = ("-", "--", ":", "-.")


def draw(bench: Sweep, found: Sequence[Goodput], path: Path) -> None:
    """Draw one panel per limit of the first token, with one line per engine."""
    limits_s = list(dict.fromkeys(one.first_token_limit_s for one in found))
    names = list(dict.fromkeys(one.engine for one in found))
    most = max(*bench.rates, *(one.requests_per_s for one in found))
    width = 1.5 + 3.2 * len(limits_s)
    with picture(path, width, 3.4 + 0.2 * len(names), columns=len(limits_s)) as [panels]:
        for panel, limit_s in zip(panels, limits_s, strict=True):
            shown = [one for one in found if one.first_token_limit_s == limit_s]
            for place, name in enumerate(names):
                points = sorted(
                    (one.itl_limit_ms, one.requests_per_s) for one in shown if one.engine == name
                )
                panel.step(*zip(*points, strict=True), where="post", label=name, **_style(place))
            panel.set(
                title=f"first token within {limit_s:g} s",
                xscale="log",
                xlabel=f"limit of the {bench.itl} gap, ms",
                ylim=(-0.02 * most, 1.1 * most),
            )
            panel.set_xticks(bench.itl_limits_ms, [f"{one:g}" for one in bench.itl_limits_ms])
            panel.tick_params(axis="x", labelsize=7, rotation=45)
            panel.minorticks_off()
        panels[0].set(ylabel=f"requests/s with {bench.share:.0%} within both limits")
        panels[0].figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
        )


def _style(place: int) -> dict[str, object]:
    """Return a line style in which overlapping lines stay distinguishable."""
    is_own = place < 2  # Baton's come first
    return {
        "color": "tab:blue" if is_own else f"C{place}",
        "linestyle": STYLES[place % len(STYLES)],
        "linewidth": 2.5 if is_own else 1.5,
        "alpha": 0.85,
        "marker": ".",
    }
