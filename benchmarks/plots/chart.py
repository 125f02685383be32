"""Chart of comparisons with other engines, from result files of two benchmarks.

Each file of the benchmark `peer` is a row of bars in tokens per second. Below are the token gaps
under long prompts, from files of the benchmark `interference`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.plots import drawn
from baton.core.errors import InvalidConfig
from benchmarks.peers.interference import FigureRow, Figures
from benchmarks.peers.peer import Comparison
from benchmarks.plots.interference import draw_gaps

COLOURS = {
    "baton": "tab:blue",
    "vllm": "tab:orange",
    "llamacpp": "tab:grey",
    "openvino": "tab:purple",
}
NAMES = {"baton": "Baton", "vllm": "vLLM", "llamacpp": "llama.cpp", "openvino": "OpenVINO"}
SIZES = {"decode": "requests in the batch", "prefill": "tokens of the prompt"}
BAR_WIDTH = 0.8 / len(NAMES)  # leaves a gap between the groups of sizes
MIN_SIZES = 4  # minimum room of a panel
WIDTH, BARS_HEIGHT, GAPS_HEIGHT, ROW_HEIGHT = 10.0, 3.2, 1.1, 0.36


@dataclass(frozen=True, slots=True)
class PeerFile:
    """Contents of a file of `python -m benchmarks peer --json`."""

    threads: int
    quantize: str
    compared: Sequence[Comparison]


def read_peer(path: Path) -> PeerFile:
    """Read a file. Raises InvalidConfig."""
    values = _read_json(path)
    try:
        compared = [Comparison(**one) for one in values["compared"]]
        return PeerFile(values["threads"], values["quantize"], compared)
    except (KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{path} was not written by `python -m benchmarks peer --json`"
        ) from error


def read_interference(path: Path) -> list[FigureRow]:
    """Read a file. Raises InvalidConfig."""
    values = _read_json(path)
    try:
        return [
            FigureRow(**{**one, "figures": Figures(**one["figures"])}) for one in values["engines"]
        ]
    except (KeyError, TypeError) as error:
        message = f"{path} was not written by `python -m benchmarks interference --json`"
        raise InvalidConfig(message) from error


def first_row_per_engine(rows: Sequence[FigureRow]) -> list[FigureRow]:
    """Return the first row of each engine."""
    by_engine: dict[str, FigureRow] = {}
    for row in rows:
        by_engine.setdefault(row.engine, row)
    return list(by_engine.values())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from error


def draw(peers: Sequence[PeerFile], rows: Sequence[FigureRow], path: Path) -> None:
    """Draw decode on the left of each row, prefill on the right. Raises InvalidConfig."""
    counts = [len(sizes_of(peer.compared, phase)) for peer in peers for phase in SIZES]
    room = max([MIN_SIZES, *counts])
    heights = [BARS_HEIGHT] * len(peers) + ([GAPS_HEIGHT + ROW_HEIGHT * len(rows)] if rows else [])
    with drawn(path, WIDTH, sum(heights)) as figure:
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, peer in zip(parts, peers, strict=False):
            for axes, phase in zip(part.subplots(1, 2), SIZES, strict=True):
                _bars(axes, peer, phase, room)
            _legend(part)
        if rows:
            draw_gaps(parts[-1].subplots(), rows)


def _bars(axes: Any, peer: PeerFile, phase: str, room: int) -> None:
    """Draw one panel with room for `room` sizes, so that bars are equally wide in all panels."""
    rates = rates_of(peer.compared, phase)
    sizes = sizes_of(peer.compared, phase)
    for place, (engine, by_size) in enumerate(rates.items()):
        at = [sizes.index(size) + (place - (len(rates) - 1) / 2) * BAR_WIDTH for size in by_size]
        style = {"color": COLOURS[engine], "label": NAMES[engine]}
        bars = axes.bar(at, list(by_size.values()), BAR_WIDTH, **style)
        axes.bar_label(bars, fmt="{:.0f}", fontsize=7)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    weights = "" if peer.quantize == "none" else f", {peer.quantize}"
    threads = f"{peer.threads} thread{'' if peer.threads == 1 else 's'}"
    axes.set(title=f"{phase}, tokens/s, {threads}{weights}", xlabel=SIZES[phase])
    axes.margins(y=0.12)
    middle = (len(sizes) - 1) / 2
    axes.set_xlim(middle - room / 2, middle + room / 2)


def _legend(part: Any) -> None:
    """Draw one legend for both panels, with each engine once."""
    named: dict[str, Any] = {}
    for axes in part.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    part.legend(
        named.values(), named, loc="outside upper left", ncols=len(named) or 1, frameon=False
    )


def sizes_of(compared: Sequence[Comparison], phase: str) -> Sequence[int]:
    return list(dict.fromkeys(one.size for one in compared if one.phase == phase))


def rates_of(compared: Sequence[Comparison], phase: str) -> Mapping[str, Mapping[int, float]]:
    """Return tokens per second by engine and size, those of Baton first."""
    rates: dict[str, dict[int, float]] = {}
    for one in compared:
        if one.phase == phase:
            rates.setdefault("baton", {})[one.size] = one.baton_tokens_per_s
            rates.setdefault(one.peer, {})[one.size] = one.peer_tokens_per_s
    return rates
