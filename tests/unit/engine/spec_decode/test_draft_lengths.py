"""Number of drafted tokens: the most that pays off, and next to nothing where none is accepted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import RequestId
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.draft_lengths import (
    IDLE_INTERVAL,
    MAX_AGE_PASSES,
    MAX_PAUSE_STEPS,
    MAX_RATIO,
    DraftLengths,
    PassCosts,
)
from baton.engine.spec_decode.proposer import DraftRow

NUM_DRAFTED = 8
MAX_ROWS = 16
PASS_S = 0.01
KNOWN = np.zeros(1, dtype=np.int64)


class Node:
    """A node whose passes take longer by `slope` with each row, in which drafts have outcomes."""

    def __init__(self, slope: float, noise: float = 0.0, method: str = "ngram") -> None:
        self.lengths = DraftLengths(Speculation(NUM_DRAFTED, max_rows=MAX_ROWS, method=method))
        self.slope, self.noise = slope, noise
        self.random = random.Random(0)
        self.num_tokens, self.took_s, self.plain_s = 0, 0.0, 0.0
        self.drafted: list[int] = []  # by step, of all rows

    def pass_s(self, num_rows: int) -> float:
        return PASS_S * (1 + self.slope * (num_rows - 1))

    def step(
        self, names: Sequence[str], num_right: Callable[[], int], predicted: tuple[int, ...] = ()
    ) -> None:
        rows = [row_of(name, predicted=predicted) for name in names]
        max_tokens = MAX_ROWS - len(names)
        chosen = []
        if self.lengths.begin_step():
            chosen = choose(self.lengths, rows, max_tokens)
        num_drafted = sum(row.max_tokens for row in chosen)
        for row in chosen:
            num_accepted = min(row.max_tokens, num_right())
            self.lengths.note_accepted(row.request_id, row.max_tokens, num_accepted)
            self.num_tokens += num_accepted
        took_s = self.pass_s(len(names) + num_drafted)
        self.num_tokens += len(names)
        self.took_s += took_s
        self.lengths.note_pass(
            len(names) + num_drafted, took_s * self.random.uniform(1 - self.noise, 1 + self.noise)
        )
        self.drafted.append(num_drafted)

    def speed_up(self, num_rows: int) -> float:
        return self.num_tokens / num_rows * self.pass_s(num_rows) / self.took_s


def row_of(name: str, max_tokens: int = NUM_DRAFTED, predicted: tuple[int, ...] = ()) -> DraftRow:
    return DraftRow(RequestId(name), KNOWN, max_tokens, 1, predicted)


def choose(lengths: DraftLengths, rows: Sequence[DraftRow], max_tokens: int) -> list[DraftRow]:
    return lengths.choose(lengths.without_pausing(rows), [1] * len(rows), max_tokens)


def answer(node: Node, *, num_rows: int, num_steps: int, num_right: Callable[[], int]) -> None:
    names = [f"{len(node.drafted)}-{row}" for row in range(num_rows)]
    for _ in range(num_steps):
        node.step(names, num_right)
    node.lengths.forget(map(RequestId, names))


def test_a_model_that_is_right_now_and_then_keeps_drafting_through_failures() -> None:
    """A third of the first drafts are right, and a row more takes 0.15 of a pass."""
    node = Node(0.15, noise=0.02, method="eagle3")

    def num_right() -> int:
        return int(node.random.random() < 0.37)

    for _ in range(30):
        answer(node, num_rows=1, num_steps=60, num_right=num_right)

    assert node.speed_up(1) > 1.12  # of 1.19; by the rule for looked-up drafts, 1.10


def test_a_model_that_is_never_right_costs_little() -> None:
    node = Node(0.15, noise=0.02, method="eagle3")
    for _ in range(30):
        answer(node, num_rows=1, num_steps=60, num_right=lambda: 0)

    assert node.speed_up(1) > 0.97


@pytest.mark.parametrize("slope", [0.0, 0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize(("num_rows", "num_steps"), [(1, 30), (1, 300), (4, 100)])
def test_drafts_that_are_never_accepted_cost_next_to_nothing(
    slope: float, num_rows: int, num_steps: int
) -> None:
    node = Node(slope, noise=0.2)

    for _ in range(20):
        answer(node, num_rows=num_rows, num_steps=num_steps, num_right=lambda: 0)

    assert node.speed_up(num_rows) > 0.97


@pytest.mark.parametrize(("slope", "least"), [(0.03, 6.5), (0.1, 4.5), (0.3, 2.3), (1.0, 0.99)])
def test_drafts_that_are_always_accepted_are_as_long_as_pays_off(
    slope: float, least: float
) -> None:
    node = Node(slope, noise=0.2)

    answer(node, num_rows=1, num_steps=200, num_right=lambda: NUM_DRAFTED)

    assert node.speed_up(1) > least


@pytest.mark.parametrize("slope", [0.03, 0.3])
def test_drafts_of_which_a_third_is_right_are_no_loss(slope: float) -> None:
    node, draw = Node(slope, noise=0.2), random.Random(1)

    for _ in range(5):
        answer(node, num_rows=2, num_steps=200, num_right=lambda: draw.choice([0, 0, 3]))

    assert node.speed_up(2) > (1.2 if slope < 0.1 else 0.98)


def test_drafts_get_the_length_that_is_accepted() -> None:
    node = Node(slope=0.1)

    answer(node, num_rows=1, num_steps=100, num_right=lambda: 2)

    assert set(node.drafted[-50:]) <= {2, 3}


def test_the_rows_whose_drafts_are_accepted_get_them() -> None:
    node = Node(slope=0.1)
    lengths = node.lengths
    for _ in range(30):
        for row in choose(lengths, [row_of("good"), row_of("bad")], 14):
            num_accepted = row.max_tokens if row.request_id == "good" else 0
            lengths.note_accepted(row.request_id, row.max_tokens, num_accepted)

    chosen = choose(lengths, [row_of("bad"), row_of("good")], 14)

    assert max(row.max_tokens for row in chosen if row.request_id == "good") == NUM_DRAFTED
    assert sum(row.max_tokens for row in chosen if row.request_id == "bad") <= 1


def test_drafting_begins_again_when_a_text_becomes_predictable() -> None:
    node = Node(slope=0.1)
    for _ in range(500):
        node.step(["a"], lambda: 0)
    num_before = len(node.drafted)

    for _ in range(IDLE_INTERVAL * MAX_PAUSE_STEPS + 20):
        node.step(["a"], lambda: NUM_DRAFTED)

    assert sum(node.drafted[:num_before]) < 30
    assert node.drafted[-1] >= NUM_DRAFTED - 1


def test_a_predicted_answer_is_tried_after_others_failed() -> None:
    node = Node(slope=0.3)
    for _ in range(30):
        answer(node, num_rows=1, num_steps=50, num_right=lambda: 0)
    node.drafted.clear()

    for _ in range(IDLE_INTERVAL):
        node.step(["a"], lambda: NUM_DRAFTED, predicted=(1, 2, 3))

    assert max(node.drafted) > 1


def test_drafting_does_not_flicker_where_it_neither_wins_nor_loses() -> None:
    node = Node(slope=0.5, noise=0.05)

    answer(node, num_rows=1, num_steps=600, num_right=lambda: node.random.choice([0, 1]))

    states = [bool(number) for number in node.drafted[100:]]
    assert sum(one != other for one, other in pairwise(states)) < 100


@given(
    st.lists(st.integers(1, NUM_DRAFTED), min_size=1, max_size=6),
    st.integers(1, MAX_ROWS),
    st.lists(st.tuples(st.integers(1, MAX_ROWS), st.floats(1e-4, 1.0)), max_size=9),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, NUM_DRAFTED)), max_size=9),
)
def test_no_row_and_no_step_gets_more_than_it_may(
    most: list[int],
    max_tokens: int,
    passes: list[tuple[int, float]],
    outcomes: list[tuple[int, int]],
) -> None:
    max_tokens = min(max_tokens, MAX_ROWS - len(most))
    lengths = DraftLengths(Speculation(NUM_DRAFTED, max_rows=MAX_ROWS))
    rows = [row_of(str(number), each) for number, each in enumerate(most)]
    choose(lengths, rows, max_tokens)
    for num_rows, took_s in passes:
        lengths.note_pass(num_rows, took_s)
    for number, num_accepted in outcomes:
        lengths.note_accepted(RequestId(str(number)), NUM_DRAFTED, num_accepted)

    chosen = choose(lengths, rows, max_tokens)

    limits = {row.request_id: row.max_tokens for row in rows}
    assert all(1 <= row.max_tokens <= limits[row.request_id] for row in chosen)
    assert len({row.request_id for row in chosen}) == len(chosen)
    assert sum(row.max_tokens for row in chosen) <= max_tokens


# --- times of passes ------------------------------------------------------------------


def test_times_that_were_not_measured_are_interpolated() -> None:
    costs = PassCosts(8)
    costs.note_pass(2, 1.0)
    costs.note_pass(4, 2.0)

    found = costs.by_num_rows()

    assert found[2:5] == [1.0, 1.5, 2.0]
    assert 0.9 < found[1] < 1.0
    assert 2.0 < found[5] < 2.1


def test_a_stall_counts_as_a_slow_pass() -> None:
    costs = PassCosts(8)
    costs.note_pass(1, 1.0)

    costs.note_pass(1, 1000.0)

    assert costs.by_num_rows()[1] < 1.0 + 0.1 * MAX_RATIO


def test_old_times_are_forgotten() -> None:
    costs = PassCosts(8)
    costs.note_pass(4, 100.0)

    for _ in range(2 * MAX_AGE_PASSES):
        costs.note_pass(1, 1.0)

    assert costs.by_num_rows()[4] < 1.2
    costs.note_pass(99, 1.0)  # more rows than are measured
    costs.note_pass(0, 1.0)
