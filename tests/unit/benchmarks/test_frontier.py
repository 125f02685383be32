"""Goodput frontier, computed from handmade answers, and its plot."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import pytest

from baton.bench.load import plan
from baton.core.errors import InvalidConfig
from benchmarks.cli.frontier import measure
from benchmarks.peers.completions_api import (
    VOCAB_SIZE,
    CompletionsApi,
    EngineFailed,
    ServedModel,
    StreamedCompletion,
)
from benchmarks.peers.frontier import (
    AnswerLatencies,
    Goodput,
    RateRun,
    Sweep,
    frontier,
    read_sweep,
    run,
    seen,
)
from benchmarks.peers.warm_engines import Start
from benchmarks.plots.frontier import draw


def swept(rate: float, first_token_s: float, itl_ms: float, *, num_failed: int = 0) -> RateRun:
    answers = [AnswerLatencies(first_token_s, itl_ms, 2 * itl_ms)] * (20 - num_failed)
    return RateRun("one", rate, answers, ["refused"] * num_failed)


def limits(share: float = 0.95, itl: str = "mean") -> Sweep:
    return Sweep(first_token_limits_s=(1.0, 3.0), itl_limits_ms=(50, 100), share=share, itl=itl)


def rates(what: Sweep, runs: Sequence[RateRun]) -> dict[tuple[float, float], float]:
    return {
        (one.first_token_limit_s, one.itl_limit_ms): one.requests_per_s
        for one in frontier(what, runs)
    }


def test_goodput_is_the_highest_rate_within_both_limits() -> None:
    runs = [swept(0.1, 0.5, 40), swept(0.2, 0.9, 90), swept(0.3, 2.5, 90)]

    assert rates(limits(), runs) == {
        (1.0, 50): 0.1,
        (1.0, 100): 0.2,
        (3.0, 50): 0.1,
        (3.0, 100): 0.3,
    }


def test_failed_requests_meet_no_limit() -> None:
    one_failed, two_failed = swept(0.1, 0.5, 40, num_failed=1), swept(0.1, 0.5, 40, num_failed=2)

    assert rates(limits(), [one_failed])[1.0, 50] == 0.1
    assert rates(limits(), [two_failed])[1.0, 50] == 0.0


def test_the_gap_limit_can_apply_to_the_longest_gap() -> None:
    assert rates(limits(itl="p99"), [swept(0.1, 0.5, 40)])[1.0, 50] == 0.0
    assert rates(limits(itl="p99"), [swept(0.1, 0.5, 40)])[1.0, 100] == 0.1


def test_time_to_first_token_counts_from_the_planned_start_and_means_are_per_token() -> None:
    found = seen(StreamedCompletion(10.5, [(11.0, 1), (11.1, 1), (11.3, 2)]), due_s=10.0)

    assert found.first_token_s == pytest.approx(1.0)
    assert found.itl_mean_ms == pytest.approx(100)
    assert found.itl_p99_ms == pytest.approx(200)


class MadeUp:
    """API that answers at once with given gaps, or refuses all but the first request."""

    def __init__(self, *, gap_s: float = 0.1, refuses: bool = False) -> None:
        self.requested: list[list[int]] = []
        self._gap_s = gap_s
        self._refuses = refuses

    def model(self) -> ServedModel:
        return ServedModel("made up", 4096)

    def stream(self, model: str, prompt: Sequence[int], max_tokens: int) -> StreamedCompletion:
        self.requested.append(list(prompt))
        if self._refuses and len(self.requested) > 1:
            raise EngineFailed("not today")
        return StreamedCompletion(0.0, [(number * self._gap_s, 1) for number in range(max_tokens)])


def started(api: MadeUp) -> Start:
    @contextmanager
    def start() -> Iterator[CompletionsApi]:
        yield cast("CompletionsApi", api)

    return start


SMALL = Sweep(
    rates=(100, 200), seconds=0.05, prompt_tokens=8, answer_tokens=4, first_token_limits_s=(1e9,)
)


def test_every_engine_gets_the_same_requests() -> None:
    apis = {"a": MadeUp(), "b": MadeUp()}
    runs: list[RateRun] = []

    run(SMALL, {name: started(api) for name, api in apis.items()}, runs.append)

    assert [(one.engine, one.rate) for one in runs] == [
        ("a", 100),
        ("a", 200),
        ("b", 100),
        ("b", 200),
    ]
    assert sorted(apis["a"].requested) == sorted(apis["b"].requested)
    assert {len(prompt) for prompt in apis["a"].requested} == {8}


def test_a_sweep_ends_once_the_widest_limits_are_exceeded() -> None:
    runs: list[RateRun] = []

    run(SMALL, {"slow": started(MadeUp(gap_s=5.0))}, runs.append)

    assert [one.rate for one in runs] == [100]


def test_an_engine_without_answers_is_named() -> None:
    api = MadeUp(refuses=True)

    with pytest.raises(EngineFailed, match="dead answered no request: not today"):
        run(SMALL, {"dead": started(api)}, lambda _: None)


class Stopped(MadeUp):
    """API that raises KeyboardInterrupt after the first rate."""

    def stream(self, model: str, prompt: Sequence[int], max_tokens: int) -> StreamedCompletion:
        streamed = super().stream(model, prompt, max_tokens)
        if len(self.requested) > 1 + NUM_AT_FIRST_RATE:  # after one warm-up request
            raise KeyboardInterrupt
        return streamed


NUM_AT_FIRST_RATE = len(plan(SMALL.load(min(SMALL.rates)), VOCAB_SIZE))


@pytest.mark.parametrize(
    ("api", "error", "at"),
    [
        (MadeUp(refuses=True), EngineFailed, [("own", 100), ("own", 200)]),
        (Stopped(), KeyboardInterrupt, [("own", 100), ("own", 200), ("other", 100)]),
    ],
)
def test_completed_rates_are_kept_if_a_later_rate_fails(
    api: MadeUp,
    error: type[BaseException],
    at: list[tuple[str, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "sweep.json"
    engines = {"own": started(MadeUp()), "other": started(api)}

    with pytest.raises(error):
        measure(SMALL, engines, tmp_path / "sweep.svg", path)

    found = read_sweep(path)
    assert [(one.engine, one.rate) for one in found.runs] == at
    assert not found.is_whole
    assert (tmp_path / "sweep.svg").exists()
    out, err = capsys.readouterr()
    assert "requests/s with the first token within" in out
    assert "broken off in the turn of other" in err
    assert "the rest is missing" in err


def test_a_finished_sweep_is_marked_complete(tmp_path: Path) -> None:
    measure(SMALL, {"own": started(MadeUp())}, None, tmp_path / "sweep.json")

    assert read_sweep(tmp_path / "sweep.json").is_whole


class Hung(MadeUp):
    """API that blocks from the second request, which is interrupted, until its engine has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = threading.Event()

    def stream(self, model: str, prompt: Sequence[int], max_tokens: int) -> StreamedCompletion:
        streamed = super().stream(model, prompt, max_tokens)
        if len(self.requested) == 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if len(self.requested) > 1:
            self.has_ended.wait()
        return streamed


def test_ctrl_c_ends_the_engine_without_waiting_for_its_answers() -> None:
    api = Hung()

    @contextmanager
    def start() -> Iterator[CompletionsApi]:
        try:
            yield cast("CompletionsApi", api)
        finally:
            api.has_ended.set()

    with pytest.raises(KeyboardInterrupt):
        run(replace(SMALL, rates=(1.0,)), {"hung": start}, lambda _: None)

    assert api.has_ended.is_set()


@pytest.mark.parametrize(
    "wrong",
    [{"rates": ()}, {"rates": (0.0,)}, {"answer_tokens": 1}, {"share": 0.0}, {"itl": "median"}],
)
def test_invalid_sweeps_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        Sweep(**wrong)  # type: ignore[arg-type]


def test_the_chart_has_a_panel_per_limit_and_names_each_engine(tmp_path: Path) -> None:
    found = [
        Goodput(f"engine {number}", limit_s, itl_ms, 0.1 * number)
        for number in range(3)
        for limit_s in (1.0, 3.0)
        for itl_ms in (50, 100)
    ]

    draw(limits(), found, tmp_path / "one.svg")

    written = (tmp_path / "one.svg").read_text(encoding="utf-8")
    for text in ("engine 0", "engine 2", "first token within 1 s", "first token within 3 s"):
        assert f"<!-- {text} -->" in written


def test_a_saved_sweep_can_be_plotted_again(tmp_path: Path) -> None:
    runs = [swept(0.1, 0.5, 40), swept(0.2, 0.9, 90, num_failed=1)]
    path = tmp_path / "sweep.json"
    reported = {"what": asdict(SMALL), "runs": [asdict(one) for one in runs]}
    path.write_text(json.dumps(reported), encoding="utf-8")

    found = read_sweep(path)

    assert found.runs == runs
    assert found.is_whole
    assert found.bench.prompt_tokens == SMALL.prompt_tokens
    assert found.bench.seconds == SMALL.seconds


def test_a_file_without_a_sweep_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")

    with pytest.raises(InvalidConfig, match=r"other\.json was not written by"):
        read_sweep(tmp_path / "other.json")
