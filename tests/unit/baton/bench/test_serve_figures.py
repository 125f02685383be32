"""Figures of a serving benchmark, computed from handmade runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.bench.benchmark import MeasuredRun, compare
from baton.bench.client import LoadRun, Sample
from baton.bench.figures import Quantiles, gaps_of, quantile, summarise
from baton.bench.load import Slo, parse_slo
from baton.bench.plots import draw
from baton.client import Finish, Served
from baton.core.errors import InvalidConfig
from baton.core.output import FinishReason


def a_sample(
    arrivals: Sequence[tuple[float, int]] = ((1.0, 1),),
    *,
    planned_s: float = 0.0,
    error: str | None = None,
    is_remote: bool = True,
) -> Sample:
    ended_s = arrivals[-1][0] if arrivals else planned_s
    sample = Sample(0, planned_s, planned_s, ended_s, list(arrivals), error=error)
    if error is None:
        served = Served("p", "d", is_remote, "", 1024, 1, "nixl", 0, 16, 1)
        num_tokens = sum(count for _, count in arrivals)
        sample.finish = Finish(FinishReason.LENGTH, 32, num_tokens, 0, 0, 0, 0, served)
    return sample


def test_time_to_first_token_counts_from_the_planned_start_not_from_the_send() -> None:
    sample = a_sample([(3.0, 1)], planned_s=1.0)
    sample.sent_s = 2.5

    figures = summarise(LoadRun([sample], 1, 3.0))

    assert figures.ttft_ms == Quantiles(2000, 2000, 2000, 2000, 2000)
    assert figures.num_late == 1


def test_tokens_of_one_message_share_one_inter_token_gap() -> None:
    assert gaps_of(a_sample([(1.0, 2), (1.5, 1), (2.5, 3)])) == [0, 0.5, 1.0, 0, 0]


def test_failures_are_counted_by_reason_and_not_as_answers() -> None:
    samples = [a_sample(), a_sample((), error="QUEUE_FULL"), a_sample((), error="QUEUE_FULL")]

    figures = summarise(LoadRun(samples, 3, 1.0))

    assert (figures.num_answered, figures.num_failed) == (1, 2)
    assert figures.errors == {"QUEUE_FULL": 2}
    assert figures.good_share == pytest.approx(1 / 3)


def test_only_answers_that_meet_every_objective_count_as_goodput() -> None:
    quick = a_sample([(0.1, 1), (0.15, 1)])
    late = a_sample([(0.9, 1), (0.95, 1)])
    halting = a_sample([(0.1, 1), (0.4, 1)])

    figures = summarise(LoadRun([quick, late, halting], 3, 1.0), parse_slo("ttft=500ms,itl=0.1s"))

    assert figures.goodput_per_s == pytest.approx(1 / 0.95)


def test_served_summaries_of_answers_are_added_up() -> None:
    figures = summarise(LoadRun([a_sample(), a_sample(is_remote=False)], 2, 1.0))

    assert (figures.num_remote, figures.num_local) == (1, 1)
    assert (figures.kv_bytes, figures.prefix_hit_tokens) == (2048, 32)


def test_a_run_that_measured_nothing_has_no_latencies() -> None:
    figures = summarise(LoadRun([], 5, 1.0, is_cut_short=True))

    assert (figures.ttft_ms, figures.itl_ms, figures.num_answered) == (None, None, 0)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_a_measured_value(share: float, value: int) -> None:
    assert quantile(range(100, 0, -1), share) == value


def test_objectives_have_units() -> None:
    assert parse_slo("ttft=500ms, e2e=2s,tpot=0.05") == Slo(ttft=0.5, tpot=0.05, e2e=2.0)


@pytest.mark.parametrize("written", ["ttft", "ttft=", "speed=5ms", "ttft=fast", "ttft=5m"])
def test_invalid_objectives_are_refused(written: str) -> None:
    with pytest.raises(InvalidConfig, match="write it like"):
        parse_slo(written)


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", [[(0.5, 1)], [(0.5, 4)], [(0.5, 1), (0.6, 1)]])
def test_charts_are_drawn_even_of_single_token_answers(
    tmp_path: Path, arrivals: list[tuple[float, int]]
) -> None:
    pytest.importorskip("matplotlib")
    run = LoadRun([a_sample(arrivals)], 1, 1.0)

    paths = draw([MeasuredRun("a", 1.0, [], run, summarise(run))], tmp_path)

    assert [path.name for path in paths] == ["latency.png", "timeline.png"]
    assert all(path.exists() for path in paths)


def test_a_comparison_pairs_rounds_and_leaves_out_interrupted_rounds() -> None:
    def measured(name: str, ttft_s: float, *, is_cut_short: bool = False) -> MeasuredRun:
        run = LoadRun([a_sample([(ttft_s, 1)])], 1, 1.0, is_cut_short=is_cut_short)
        return MeasuredRun(name, 1.0, [], run, summarise(run))

    rounds = [
        measured("a", 1.0),
        measured("b", 2.0),
        measured("b", 4.0),
        measured("a", 1.0),
        measured("a", 9.0, is_cut_short=True),
    ]

    ratios = {one.name: one for one in compare(rounds, "a", "b")}

    reported = ratios["ttft_ms p50"]
    assert (reported.first, reported.second, reported.ratio) == (1000, 3000, 0.375)
    assert (reported.least, reported.most) == (0.25, 0.5)
