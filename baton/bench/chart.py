"""One picture of what was measured beside other engines, from the files of two benches.

Bars of tokens per second, a row for each file of `baton bench peer`; below them what long prompts
do to answers under way, from files of `baton bench interference`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.interference import Figures, Row
from baton.bench.interference_plot import draw_gaps
from baton.bench.peer import Comparison
from baton.bench.plotting import drawn
from engine.errors import InvalidConfig

COLOURS = {"baton": "tab:blue", "vllm": "tab:orange", "llamacpp": "tab:grey"}
NAMES = {"baton": "Baton", "vllm": "vLLM", "llamacpp": "llama.cpp"}
SIZES = {"decode": "requests in the batch", "prefill": "tokens of the prompt"}
BAR_WIDTH = 0.8 / len(NAMES)  # so that those of one size leave room beside them
FEWEST_SIZES = 4  # that a panel has room for
WIDTH, BARS_HEIGHT, GAPS_HEIGHT, ROW_HEIGHT = 10.0, 3.2, 1.1, 0.36


@dataclass(frozen=True, slots=True)
class PeerFile:
    """What `baton bench peer --json` wrote."""

    threads: int
    quantize: str
    compared: Sequence[Comparison]


def read_peer(path: Path) -> PeerFile:
    """Raises InvalidConfig."""
    told = _told(path)
    try:
        compared = [Comparison(**one) for one in told["compared"]]
        return PeerFile(told["threads"], told["quantize"], compared)
    except (KeyError, TypeError) as error:
        raise InvalidConfig(f"{path} was not written by `baton bench peer --json`") from error


def read_interference(path: Path) -> list[Row]:
    """Raises InvalidConfig."""
    told = _told(path)
    try:
        return [Row(**{**one, "figures": Figures(**one["figures"])}) for one in told["engines"]]
    except (KeyError, TypeError) as error:
        message = f"{path} was not written by `baton bench interference --json`"
        raise InvalidConfig(message) from error


def once_each(rows: Sequence[Row]) -> list[Row]:
    """The first of each engine, in that order."""
    by_engine: dict[str, Row] = {}
    for row in rows:
        by_engine.setdefault(row.engine, row)
    return list(by_engine.values())


def _told(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from error


def draw(peers: Sequence[PeerFile], rows: Sequence[Row], path: Path) -> None:
    """Decode on the left of a row of bars, prefill on the right. Raises InvalidConfig."""
    found = [len(sizes_of(peer.compared, phase)) for peer in peers for phase in SIZES]
    room = max([FEWEST_SIZES, *found])
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
    """`room`: for so many sizes, the same in each panel, so all bars have one width."""
    rates = rates_of(peer.compared, phase)
    sizes = sizes_of(peer.compared, phase)
    for place, (engine, found) in enumerate(rates.items()):
        at = [sizes.index(size) + (place - (len(rates) - 1) / 2) * BAR_WIDTH for size in found]
        look = {"color": COLOURS[engine], "label": NAMES[engine]}
        bars = axes.bar(at, list(found.values()), BAR_WIDTH, **look)
        axes.bar_label(bars, fmt="{:.0f}", fontsize=7)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    weights = "" if peer.quantize == "none" else f", {peer.quantize}"
    threads = f"{peer.threads} thread{'' if peer.threads == 1 else 's'}"
    axes.set(title=f"{phase}, tokens/s, {threads}{weights}", xlabel=SIZES[phase])
    axes.margins(y=0.12)
    middle = (len(sizes) - 1) / 2
    axes.set_xlim(middle - room / 2, middle + room / 2)


def _legend(part: Any) -> None:
    """Each engine once, whichever of the two panels it is in."""
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
    """Tokens per second by engine and size; Baton first, whose figure is the same beside each."""
    rates: dict[str, dict[int, float]] = {}
    for one in compared:
        if one.phase == phase:
            rates.setdefault("baton", {})[one.size] = one.baton_tokens_per_s
            rates.setdefault(one.peer, {})[one.size] = one.peer_tokens_per_s
    return rates
