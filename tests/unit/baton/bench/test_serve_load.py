"""Load plans: drawn from a seed, at the requested rate."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.load import (
    Arrivals,
    ServeLoad,
    parse_lengths,
    plan,
    read_prompts,
    warm_up,
)
from baton.core.errors import InvalidConfig

VOCAB_SIZE = 500
LOAD = ServeLoad(rate=10, num_requests=200, prompt=parse_lengths("uniform:4:9"))


def test_the_load_plan_depends_on_the_seed_alone() -> None:
    first, again = plan(LOAD, VOCAB_SIZE), plan(LOAD, VOCAB_SIZE)
    other = plan(replace(LOAD, seed=1), VOCAB_SIZE)

    assert first == again
    assert {one.prompt for one in first}.isdisjoint(one.prompt for one in other)


@pytest.mark.parametrize("arrivals", Arrivals)
def test_arrivals_have_the_requested_rate(arrivals: Arrivals) -> None:
    load = replace(LOAD, num_requests=2000, arrivals=arrivals)

    times = [one.at_s for one in plan(load, VOCAB_SIZE)]

    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(10, rel=0.1)


def test_burst_arrivals_coincide_and_constant_arrivals_do_not() -> None:
    bursts = plan(replace(LOAD, arrivals=Arrivals.BURST, burst_size=5), VOCAB_SIZE)
    steady = plan(replace(LOAD, arrivals=Arrivals.CONSTANT), VOCAB_SIZE)

    assert [one.at_s for one in bursts[:7]] == [0, 0, 0, 0, 0, 0.5, 0.5]
    assert len({one.at_s for one in steady}) == len(steady)


def test_a_duration_limits_the_load_plan_in_place_of_a_request_count() -> None:
    requests = plan(replace(LOAD, duration_s=3.0, arrivals=Arrivals.CONSTANT), VOCAB_SIZE)

    assert len(requests) == 30


def test_prompts_of_one_group_share_a_prefix_and_have_different_suffixes() -> None:
    requests = plan(replace(LOAD, prefix_tokens=8, prefix_groups=3), VOCAB_SIZE)

    assert len({one.prompt[:8] for one in requests}) == 3
    assert len({one.prompt[8:] for one in requests}) == len(requests)


@pytest.mark.parametrize("prefix_tokens", [0, 8])
def test_the_warm_up_sends_no_prompt_of_the_workload(prefix_tokens: int) -> None:
    load = replace(LOAD, prefix_tokens=prefix_tokens)

    warm = warm_up(load, VOCAB_SIZE)

    assert len(warm) == load.num_warm_up
    assert {one.prompt[:4] for one in warm}.isdisjoint(
        one.prompt[:4] for one in plan(load, VOCAB_SIZE)
    )


@pytest.mark.parametrize(
    ("written", "possible"),
    [
        ("7", {7}),
        ("uniform:3:5", {3, 4, 5}),
        ("mix:64x9,2048x1", {64, 2048}),
    ],
)
def test_lengths_are_drawn_from_the_given_distribution(written: str, possible: set[int]) -> None:
    lengths, draw = parse_lengths(written), random.Random(0)

    assert {lengths.draw(draw) for _ in range(200)} == possible


def test_lognormal_lengths_lie_around_their_median() -> None:
    lengths, draw = parse_lengths("lognormal:100:0.5"), random.Random(0)

    drawn = sorted(lengths.draw(draw) for _ in range(2000))

    assert drawn[1000] == pytest.approx(100, rel=0.1)
    assert drawn[-1] > 300


@pytest.mark.parametrize(
    "written",
    [
        "",
        "x",
        "0",
        "-3",
        "uniform:5",
        "uniform:9:3",
        "mix:",
        "mix:64",
        "normal:3:4",
        "0.5",
        "a:b:c",
    ],
)
def test_an_invalid_length_is_refused_with_the_valid_forms(written: str) -> None:
    with pytest.raises(InvalidConfig, match="write it like"):
        parse_lengths(written)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": -1}, {"duration_s": 0}, {"burst_size": 0}])
def test_an_inconsistent_load_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        replace(LOAD, **wrong)  # type: ignore[arg-type]


def test_each_line_of_a_prompt_file_is_sent_at_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "at_s": 5}\n\n{"prompt": [1, 2], "max_tokens": 3}\n')
    load = replace(LOAD, num_requests=3, arrivals=Arrivals.CONSTANT)

    requests = plan(load, VOCAB_SIZE, read_prompts(path))

    assert [(one.prompt, one.at_s) for one in requests] == [((1, 2), 0.1), ("a", 0.2), ("a", 5)]
    assert requests[0].max_tokens == 3


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 3}', '{"prompt": "a", "at_s": []}'])
def test_an_invalid_line_is_reported_with_its_file_and_line_number(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')

    with pytest.raises(InvalidConfig, match=r"prompts.jsonl:2: write it like"):
        read_prompts(path)
