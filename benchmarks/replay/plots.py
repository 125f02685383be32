"""Plot of `python -m benchmarks replay`."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from baton.bench.figures import ttft_of
from baton.bench.plots import picture
from benchmarks.replay.figures import answered_requests
from benchmarks.replay.run import ReplayedRequest, ReplayRun
from benchmarks.replay.sources import num_reused

NUM_BARS = 40


def draw(run: ReplayRun, path: Path) -> bool:
    """Draw reuse, sources and latency of a run. Returns False if no request was answered."""
    answered = sorted(answered_requests(run), key=lambda one: one.sample.sent_s)
    if not answered:
        return False
    with picture(path, 13, 4.2, columns=3) as [[reuse, sources, first_token]]:
        _draw_reuse(reuse, answered)
        _draw_sources(sources, answered)
        _draw_first_token(first_token, answered)
    return True


def _draw_reuse(axes: Any, answered: list[ReplayedRequest]) -> None:
    num_tokens = list(accumulate(one.num_prompt_tokens for one in answered))
    for label, style, counts in (
        ("ideal", ":", [one.num_ideal_tokens for one in answered]),
        ("reused", "-", [num_reused(one.by_source) for one in answered]),
    ):
        shares = [part / whole for part, whole in zip(accumulate(counts), num_tokens, strict=True)]
        axes.plot(range(1, len(shares) + 1), shares, style, label=label)
    axes.set(title="reuse so far", xlabel="requests", ylabel="share of prompt tokens")
    axes.set_ylim(0, 1.01)
    axes.legend(frameon=False)


def _draw_sources(axes: Any, answered: list[ReplayedRequest]) -> None:
    """Stack the prompt tokens by source, in groups of consecutive requests."""
    step = -(-len(answered) // NUM_BARS)
    groups = [answered[first : first + step] for first in range(0, len(answered), step)]
    names = sorted({name for one in answered for name in one.by_source})
    below = [0.0] * len(groups)
    places = [number * step for number in range(len(groups))]
    for name in names:
        heights = [sum(one.by_source.get(name, 0) for one in group) for group in groups]
        axes.bar(places, heights, step, bottom=below, align="edge", label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(title="prompt tokens by source", xlabel="requests", ylabel="tokens")
    axes.legend(frameon=False, fontsize=8)


def _draw_first_token(axes: Any, answered: list[ReplayedRequest]) -> None:
    ordered = sorted(ttft_of(one.sample) * 1e3 for one in answered if one.sample.arrivals)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    axes.set(title="time to first token", xlabel="ms", ylabel="share of requests", xscale="log")
    axes.set_ylim(0, 1.01)
