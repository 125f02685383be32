"""Tables of `baton bench replay`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.cli.show import show_table

if TYPE_CHECKING:
    from baton.bench.replay.figures import ReplayFigures


def show_figures(name: str, figures: ReplayFigures) -> None:
    summary = [{"what": what, "figure": figure} for what, figure in _summary(figures).items()]
    show_table(f"replay of {name}", summary)
    num_tokens = figures.num_prompt_tokens
    _show_tokens("prompt tokens by source", "source", figures.tokens_by_source, num_tokens)
    _show_tokens(
        "prompt tokens computed again, by where they were",
        "computed before by",
        figures.lost_by_reason,
        num_tokens,
    )
    if figures.errors:
        rows = [{"reason": one, "requests": count} for one, count in figures.errors.items()]
        show_table("failures", rows)


def _summary(figures: ReplayFigures) -> dict[str, str]:
    of_ideal = figures.reuse_of_ideal
    return {
        "answered": f"{figures.num_answered} of {figures.num_planned}",
        "failed": str(sum(figures.errors.values())),
        "truncated": f"{figures.num_truncated} ({figures.num_cut_tokens} tokens)",
        "late sends": str(figures.num_late),
        "prompt tokens": str(figures.num_prompt_tokens),
        "distinct tokens": str(figures.num_distinct_tokens),
        "reuse": f"{figures.reuse:.4f}",
        "ideal reuse": f"{figures.ideal_reuse:.4f}",
        "reuse/ideal": "-" if of_ideal is None else f"{of_ideal:.4f}",
        **_quantiles(figures),
        "good requests/s": f"{figures.good_requests_per_s:.2f}",
        "good tokens/s": f"{figures.good_tokens_per_s:.2f}",
    }


def _quantiles(figures: ReplayFigures) -> dict[str, str]:
    return {
        f"{name} p50, p99 ms": f"{one.p50:.1f}, {one.p99:.1f}"
        for name, one in (("TTFT", figures.ttft_ms), ("ITL", figures.itl_ms))
        if one is not None
    }


def _show_tokens(title: str, column: str, counts: Mapping[str, int], num_tokens: int) -> None:
    rows = [
        {column: name, "tokens": count, "share": f"{count / num_tokens:.4f}"}
        for name, count in counts.items()
    ]
    if rows:
        show_table(title, rows)
