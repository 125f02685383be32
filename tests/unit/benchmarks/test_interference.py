"""Figures of the interference benchmark, computed from given arrival times."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from baton.core.errors import InvalidConfig
from benchmarks.cli.interference import measure
from benchmarks.peers.completions_api import (
    CompletionsApi,
    EngineFailed,
    ServedModel,
    Stop,
    StreamedCompletion,
)
from benchmarks.peers.interference import (
    FigureRow,
    Figures,
    Interference,
    Turn,
    figures,
    rows_of,
    run,
)
from benchmarks.peers.warm_engines import Start
from benchmarks.plots.chart import read_interference
from benchmarks.plots.interference import draw


def stream(*arrivals_s: float, tokens: int = 1) -> StreamedCompletion:
    return StreamedCompletion(0.0, [(arrival_s, tokens) for arrival_s in arrivals_s])


def test_only_gaps_within_the_interval_are_counted() -> None:
    steady = stream(0.0, 5.0, 10.0, 10.1, 10.2, 10.5, 20.0)

    found = figures([steady], [StreamedCompletion(10.0, [(10.4, 1)])], began_s=10.0, ended_s=11.0)

    assert found.itl_most_ms == pytest.approx(300)
    assert found.itl_p50_ms == pytest.approx(100)
    assert found.first_token_p50_s == pytest.approx(0.4)
    assert found.tokens_per_s == pytest.approx(4)


def test_messages_of_several_tokens_count_as_one_gap_and_all_their_tokens() -> None:
    found = figures([stream(1.0, 1.2, 1.4, tokens=3)], [stream(1.1)], began_s=1.0, ended_s=2.0)

    assert found.itl_p50_ms == pytest.approx(200)
    assert found.tokens_per_s == pytest.approx(7)


def test_stalled_streams_are_an_error() -> None:
    with pytest.raises(EngineFailed):
        figures([stream(0.5)], [stream(1.1)], began_s=1.0, ended_s=2.0)


def test_an_empty_load_is_refused() -> None:
    with pytest.raises(InvalidConfig):
        Interference(num_prompts=0)


def test_ratios_are_computed_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    itl_by_engine = {"own": [10.0, 20.0, 40.0], "other": [20.0, 60.0, 40.0]}
    started: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> str:
            started.append(self.name)
            return self.name

        def __exit__(self, *_: object) -> None: ...

    def made_up(_: Interference, name: object) -> Figures:
        itl_ms = itl_by_engine[str(name)].pop(0)
        return Figures(itl_ms, itl_ms, itl_ms, 1.0, 1.0, 1.0)

    monkeypatch.setattr("benchmarks.peers.interference.measured", made_up)
    engines = {name: (lambda name=name: Named(name)) for name in itl_by_engine}

    turns: list[Turn] = []
    run(Interference(), engines, turns.append)  # type: ignore[arg-type]
    own, other = rows_of(turns)

    assert started == ["own", "other"] * 3
    assert own.itl_p50_ratio == 1.0
    assert other.itl_p50_ratio == 2.0
    assert (own.figures.itl_p50_ms, other.figures.itl_p50_ms) == (20.0, 40.0)


MEASURED_TOKENS = 4  # give two gaps even if one stream ends among them


class Steady:
    """API that answers a prompt once the running streams have decoded some more tokens."""

    url = "made up"

    def __init__(self) -> None:
        self._num_decoded = 0
        self._decoded = threading.Condition()

    def model(self) -> ServedModel:
        return ServedModel("made up", 4096)

    def stream(
        self, model: str, prompt: Sequence[int], max_tokens: int, stop: Stop | None = None
    ) -> StreamedCompletion:
        streamed = StreamedCompletion(time.monotonic())
        if stop is None:
            self._wait_for_streams()
        for _ in range(max_tokens):
            streamed.arrivals.append((time.monotonic(), 1))
            if stop is not None:
                self._count_token()
                if stop():
                    break
        return streamed

    def _wait_for_streams(self) -> None:
        with self._decoded:
            if self._num_decoded:  # else the engine is warmed up
                enough = self._num_decoded + MEASURED_TOKENS
                assert self._decoded.wait_for(lambda: self._num_decoded >= enough, 60)

    def _count_token(self) -> None:
        with self._decoded:
            self._num_decoded += 1
            self._decoded.notify_all()


def starts(num_times: int, error: BaseException) -> Start:
    """Return a start function that succeeds `num_times` times and then raises the error."""
    left = [Steady() for _ in range(num_times)]

    @contextmanager
    def start() -> Iterator[CompletionsApi]:
        if not left:
            raise error
        yield cast("CompletionsApi", left.pop())

    return start


SMALL = Interference(num_streams=1, num_prompts=2, every_s=0.0, num_rounds=3)


@pytest.mark.parametrize("error", [EngineFailed("gone"), KeyboardInterrupt(), ValueError("a bug")])
def test_completed_rounds_are_kept_if_a_later_round_fails(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = {"own": starts(3, error), "other": starts(1, error)}

    with pytest.raises(type(error)):
        measure(SMALL, engines, tmp_path / "one.svg", tmp_path / "one.json")

    reported = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert (reported["rounds"], reported["is_whole"]) == (1, False)
    assert [row.engine for row in read_interference(tmp_path / "one.json")] == ["own", "other"]
    assert (tmp_path / "one.svg").exists()
    out, err = capsys.readouterr()
    assert "medians of 1 rounds" in out
    assert "broken off in the turn of other" in err
    assert "the rest is missing" in err


def test_engines_measured_before_the_first_round_failed_are_kept(tmp_path: Path) -> None:
    gone = EngineFailed("gone")
    engines = {"own": starts(3, gone), "second": starts(3, gone), "third": starts(0, gone)}

    with pytest.raises(EngineFailed):
        measure(SMALL, engines, None, tmp_path / "one.json")

    rows = read_interference(tmp_path / "one.json")
    assert [row.engine for row in rows] == ["own", "second"]


def test_no_file_is_written_without_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineFailed):
        measure(SMALL, {"own": starts(0, EngineFailed("gone"))}, None, tmp_path / "one.json")

    assert not (tmp_path / "one.json").exists()
    assert capsys.readouterr().out == ""


def test_a_finished_run_is_marked_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(SMALL, {"own": starts(3, EngineFailed("gone"))}, None, tmp_path / "one.json")

    reported = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert (reported["rounds"], reported["is_whole"]) == (3, True)
    assert "warning" not in capsys.readouterr().err


def test_the_chart_names_each_engine(tmp_path: Path) -> None:
    found = Figures(50.0, 1500.0, 1600.0, 1.5, 1.6, 40.0)
    rows = [FigureRow(f"engine {number}", found, 1.0, 1.0, 1.0) for number in range(3)]

    draw(Interference(), rows, tmp_path / "one.svg")

    written = (tmp_path / "one.svg").read_text(encoding="utf-8")
    for row in rows:
        assert f"<!-- {row.engine} -->" in written
    assert "<!-- 1500 -->" in written
