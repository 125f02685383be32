"""Chart of comparisons with other engines, drawn from handmade files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from benchmarks.peers.interference import FigureRow, Figures
from benchmarks.peers.peer import Comparison
from benchmarks.plots.chart import (
    draw,
    first_row_per_engine,
    rates_of,
    read_interference,
    read_peer,
)

COMPARED = [
    Comparison(peer, phase, size, rate, rate / 2, 2.0, 1.9, 2.1)
    for phase, sizes in (("decode", (1, 32)), ("prefill", (512, 2048)))
    for size, rate in zip(sizes, (24.0, 346.0), strict=True)
    for peer in ("vllm", "llamacpp")
    if peer == "vllm" or size != 32
]
ROWS = [
    FigureRow(engine, Figures(50.0, 1500.0, 1600.0, 1.5, 1.6, 40.0), 1.0, 1.0, 1.0)
    for engine in ("baton, prefill and decode", "vllm, colocated, steps of 64")
]


def written(at: Path, reported: object) -> Path:
    at.write_text(json.dumps(reported), encoding="utf-8")
    return at


def peer_file(folder: Path, threads: int = 2) -> Path:
    reported = {
        "model": "m",
        "threads": threads,
        "quantize": "none",
        "compared": [asdict(one) for one in COMPARED],
    }
    return written(folder / f"peer-{threads}.json", reported)


def interference_file(folder: Path) -> Path:
    reported = {"what": {}, "engines": [asdict(row) for row in ROWS]}
    return written(folder / "interference.json", reported)


def test_written_figures_are_read_back(tmp_path: Path) -> None:
    peer = read_peer(peer_file(tmp_path, threads=1))

    assert peer.threads == 1
    assert peer.compared == COMPARED
    assert read_interference(interference_file(tmp_path)) == ROWS


def test_an_engine_in_several_files_is_plotted_from_the_first() -> None:
    again = [replace(ROWS[1], itl_p50_ratio=2.0), replace(ROWS[1], engine="vllm, patched")]

    assert first_row_per_engine([*ROWS, *again]) == [*ROWS, again[1]]


def test_each_engine_has_a_bar_for_each_measured_size() -> None:
    assert rates_of(COMPARED, "decode") == {
        "baton": {1: 24.0, 32: 346.0},
        "vllm": {1: 12.0, 32: 173.0},
        "llamacpp": {1: 12.0},
    }


@pytest.mark.slow
def test_the_chart_contains_all_given_figures(tmp_path: Path) -> None:
    peers = [read_peer(peer_file(tmp_path, threads)) for threads in (1, 2)]

    draw(peers, ROWS, tmp_path / "one.svg")

    drawn = (tmp_path / "one.svg").read_text(encoding="utf-8")
    for text in (
        "decode, tokens/s, 1 thread",
        "prefill, tokens/s, 2 threads",
        "llama.cpp",
        "vllm, colocated, steps of 64",
        "346",
        "1500",
    ):
        assert f"<!-- {text} -->" in drawn


@pytest.mark.parametrize("read", [read_peer, read_interference])
def test_other_files_are_refused_by_name(read: Callable[[Path], object], tmp_path: Path) -> None:
    other = written(tmp_path / "other.json", {"rates": []})

    with pytest.raises(InvalidConfig, match=r"other\.json was not written by"):
        read(other)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read(tmp_path / "gone.json")
