"""Figures of the hand-off benchmark, computed from given times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import cast

import pytest

from baton.core.errors import InvalidConfig
from benchmarks.cli.handover import measure
from benchmarks.peers.completions_api import (
    CompletionsApi,
    EngineFailed,
    ServedModel,
    StreamedCompletion,
)
from benchmarks.peers.handover import NUM_WARM_UP, Handover, TimedPair, Times, added, run
from benchmarks.peers.warm_engines import Start


class Answers:
    """API that records its requests and answers after given times."""

    def __init__(self, name: str, requested: list[tuple[str, list[int]]], *times_s: float) -> None:
        self.url = name
        self._asked = requested
        self._times_s = times_s

    def model(self) -> ServedModel:
        return ServedModel("made up", 4096)

    def stream(self, model: str, prompt: Sequence[int], max_tokens: int) -> StreamedCompletion:
        self._asked.append((self.url, list(prompt)))
        return StreamedCompletion(0.0, [(time_s, 1) for time_s in self._times_s])


def started(answers: Answers) -> Start:
    @contextmanager
    def start() -> Iterator[CompletionsApi]:
        yield cast("CompletionsApi", answers)

    return start


def test_each_prompt_is_sent_to_both_engines_in_alternating_order() -> None:
    requested: list[tuple[str, list[int]]] = []
    together = started(Answers("together", requested, 1.0, 1.1))
    apart = started(Answers("apart", requested, 1.25, 1.5))

    pairs: list[TimedPair] = []

    run(Handover(prompt_tokens=7, num_pairs=2), together, apart, pairs.append)

    measured = requested[-4:]
    assert [name for name, _ in measured] == ["together", "apart", "apart", "together"]
    assert measured[0][1] == measured[1][1] != measured[2][1] == measured[3][1]
    for pair in pairs:
        assert astuple(pair.together) == pytest.approx((1000, 100))
        assert astuple(pair.apart) == pytest.approx((1250, 250))


def test_ratios_are_computed_per_pair() -> None:
    pairs = [
        TimedPair(Times(100, 10), Times(110, 10)),
        TimedPair(Times(200, 10), Times(204, 30)),
        TimedPair(Times(400, 10), Times(420, 20)),
    ]

    first, gap, second = added(pairs)

    assert first.added_share == pytest.approx(0.05)
    assert first.least_share == pytest.approx(0.02)
    assert first.most_share == pytest.approx(0.1)
    assert first.added_ms == pytest.approx(10)
    assert (first.together_ms, first.apart_ms) == (200, 204)
    assert gap.added_share == pytest.approx(1.0)
    assert second.added_ms == pytest.approx(24)


def test_an_answer_in_one_message_has_no_second_token_time() -> None:
    whole = started(Answers("at once", [], 1.0))

    with pytest.raises(EngineFailed, match="at once"):
        run(Handover(), whole, whole, lambda *_: None)


class Ends(Answers):
    """API that fails after a number of answers."""

    num_left = NUM_WARM_UP + 2

    def stream(self, model: str, prompt: Sequence[int], max_tokens: int) -> StreamedCompletion:
        if self.num_left == 0:
            raise EngineFailed("gone")
        self.num_left -= 1
        return super().stream(model, prompt, max_tokens)


def test_completed_pairs_are_kept_if_a_later_pair_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = started(Answers("together", [], 1.0, 1.1))
    apart = started(Ends("apart", [], 1.25, 1.5))
    path = tmp_path / "handover.json"

    with pytest.raises(EngineFailed, match="gone"):
        measure(Handover(prompt_tokens=7, num_pairs=5), together, apart, 1, path)

    reported = json.loads(path.read_text(encoding="utf-8"))
    assert (len(reported["pairs"]), reported["is_whole"]) == (2, False)
    out, err = capsys.readouterr()
    assert "medians of 2 pairs" in out
    assert "broken off" in err


def test_zero_pairs_are_refused() -> None:
    with pytest.raises(InvalidConfig):
        Handover(num_pairs=0)
