"""Plots of `baton bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, groupby, pairwise
from pathlib import Path
from typing import Any

from baton.bench.benchmark import MeasuredRun
from baton.bench.client import Sample
from baton.bench.figures import gaps_of, ttft_of
from baton.core.errors import InvalidConfig

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
# A prompt of at least this many times the median length is marked as long.
LONG = 4
MILLIS = 1e3


def draw(measured: Sequence[MeasuredRun], folder: Path) -> list[Path]:
    """Draw all plots for which the runs have data, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    answered = [one for one in measured if any(sample.arrivals for sample in one.run.samples)]
    if not answered:
        return []
    paths = [folder / "latency.png", folder / "timeline.png"]
    _latency(answered, paths[0])
    _timeline(answered, paths[1])
    if len({one.rate for one in answered}) > 1:
        paths.append(folder / "goodput.png")
        _goodput(answered, paths[-1])
    return paths


def _latency(measured: Sequence[MeasuredRun], path: Path) -> None:
    """Plot the latency distributions, pooling the rounds of a cluster at one rate."""
    with picture(path, 11, 4.2, columns=2) as [[first, gaps]]:
        for colour, (label, samples) in zip(cycle(COLOURS), _by_label(measured), strict=False):
            _step(first, [ttft_of(one) for one in samples], label, colour)
            gaps_s = [gap for one in samples for gap in gaps_of(one) if gap]
            _step(gaps, gaps_s, label, colour, is_tail=True)
        first.set(title="time to first token", ylabel="share of requests")
        first.set_ylim(0, 1.01)
        gaps.set(title="gaps between tokens", ylabel="share of longer gaps", yscale="log")
        num_gaps = sum(len(gaps_of(sample)) for one in measured for sample in one.run.samples)
        gaps.set_ylim(0.5 / max(num_gaps, 50), 1.2)
        gaps.set_xlim(left=min(_usual_gap(one) for one in measured) / 4)
        gaps.axhline(0.01, color="grey", linewidth=0.8, linestyle=":")
        gaps.text(0.01, 0.0105, "p99", transform=gaps.get_yaxis_transform(), va="bottom", **SMALL)
        for axes in (first, gaps):
            axes.set(xscale="log", xlabel="ms")
            axes.xaxis.set_major_formatter(_plain)
        gaps.yaxis.set_major_formatter(_plain)
        gaps.legend(frameon=False, loc="lower left")


def _usual_gap(one: MeasuredRun) -> float:
    """Return the median gap; much shorter ones show message reading, not token generation."""
    return (one.figures.itl_ms.p50 if one.figures.itl_ms else 0.0) or 1.0


SMALL: dict[str, Any] = {"fontsize": 8, "color": "grey"}


def _plain(value: float, _place: int) -> str:
    return f"{value:g}"


def _step(
    axes: Any, values_s: Sequence[float], label: str, colour: str, *, is_tail: bool = False
) -> None:
    """Plot the cumulative distribution of the values, or its complement if `is_tail`."""
    ordered = sorted(value * MILLIS for value in values_s)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    if is_tail:  # the share above the last value is 0, which a log scale cannot show
        ordered, shares = ordered[:-1], [1 - share for share in shares[:-1]]
    axes.step(ordered, shares, where="post", label=label, color=colour, linewidth=1.5)


def _timeline(measured: Sequence[MeasuredRun], path: Path) -> None:
    """Plot the last round of each cluster at its highest rate, stacked, on one scale."""
    last = {one.name: one for one in sorted(measured, key=lambda one: one.rate)}
    with picture(path, 11, 1.0 + 2.7 * len(last), rows=len(last)) as rows:
        highest = 10.0
        for colour, axes, (name, one) in zip(COLOURS, rows[:, 0], last.items(), strict=False):
            points = [point for sample in one.run.samples for point in _points(sample)]
            highest = max([highest, *(gap for _, gap in points)])
            axes.plot(*_columns(points), ".", color=colour, markersize=3, alpha=0.5)
            _mark_long_prompts(axes, one)
            axes.set(ylabel="gap before a token, ms", yscale="log")
            axes.set_title(f"{name}, {one.rate:g} requests/s", loc="left")
            axes.yaxis.set_major_formatter(_plain)
        for axes in rows[:, 0]:
            axes.set_xlim(0, max(one.run.duration_s for one in last.values()))
            axes.set_ylim(1, highest * 1.5)
            handles, _ = axes.get_legend_handles_labels()
            if handles:
                axes.legend(frameon=False, loc="upper right", fontsize=8)
        rows[-1, 0].set_xlabel("seconds since the first request was due")


def _points(sample: Sample) -> list[tuple[float, float]]:
    return [
        (at_s, (at_s - before_s) * MILLIS) for (before_s, _), (at_s, _) in pairwise(sample.arrivals)
    ]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _mark_long_prompts(axes: Any, measured: MeasuredRun) -> None:
    """Shade the time from the planned send of each long prompt to its first token."""
    lengths = sorted(_prompt_tokens(one) for one in measured.run.samples)
    limit = LONG * lengths[len(lengths) // 2]
    label: str | None = f"a prompt of at least {limit} tokens is computed"
    for sample in measured.run.samples:
        if _prompt_tokens(sample) >= limit and sample.arrivals:
            end_s = sample.arrivals[0][0]
            axes.axvspan(sample.planned_s, end_s, color="grey", alpha=0.2, lw=0, label=label)
            label = None


def _prompt_tokens(sample: Sample) -> int:
    return sample.finish.num_prompt_tokens if sample.finish is not None else 0


def _goodput(measured: Sequence[MeasuredRun], path: Path) -> None:
    with picture(path, 6.5, 4.2) as [[axes]]:
        ordered = sorted(measured, key=_name)
        for colour, (name, runs) in zip(COLOURS, groupby(ordered, key=_name), strict=False):
            points = sorted((one.rate, one.figures.goodput_per_s) for one in runs)
            axes.plot(*_columns(points), "o-", color=colour, label=name)
        rates = sorted({one.rate for one in measured})
        axes.plot(rates, rates, ":", color="grey", label="offered load")
        axes.set(xlabel="offered requests per second", xlim=(0, None), ylim=(0, None))
        axes.set(ylabel="good answers per second", title="goodput")
        axes.legend(frameon=False)


def _name(one: MeasuredRun) -> str:
    return one.name


def _by_label(measured: Sequence[MeasuredRun]) -> list[tuple[str, list[Sample]]]:
    groups: dict[str, list[Sample]] = {}
    for one in measured:
        samples = groups.setdefault(f"{one.name}, {one.rate:g}/s", [])
        samples += [sample for sample in one.run.samples if sample.arrivals]
    return list(groups.items())


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
