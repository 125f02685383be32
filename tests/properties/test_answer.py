"""Answer assembly from two node RPCs and many attempts: each token once, in its place."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import RequestId
from baton.core.output import FinishReason, Output
from baton.core.stop_strings import StopRule, StopWatcher
from baton.router.answer import AnswerAssembler

TOKENS = tuple(range(100, 120))
LETTERS = "ab"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3).map(tuple)


@st.composite
def told_of(draw: st.DrawFn) -> list[Output]:
    """Draw outputs that cover the answer, from several sources, in any order."""
    outputs = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.lists(st.integers(1, len(TOKENS) - 1), unique=True).map(sorted))
        bounds = [0, *cuts, len(TOKENS)]
        outputs += [an_output(a, b) for a, b in pairwise(bounds)]
    return draw(st.permutations(outputs))


def an_output(start: int, end: int) -> Output:
    reason = FinishReason.LENGTH if end == len(TOKENS) else None
    return Output(RequestId("r"), start, TOKENS[start:end], finish_reason=reason)


@given(told_of(), st.integers(1, 4))
def test_tokens_are_emitted_once_and_in_order_from_any_source(
    outputs: list[Output], num_at_once: int
) -> None:
    answer = AnswerAssembler()
    taken: list[int] = []

    for start in range(0, len(outputs), num_at_once):
        assert (answer.finish is None) == (len(taken) < len(TOKENS))
        chunk = answer.take(*outputs[start : start + num_at_once])
        if chunk is not None:
            assert chunk.first_index == len(taken)
            taken += chunk.token_ids

    assert tuple(taken) == TOKENS
    assert answer.finish is not None


@given(st.lists(st.text(LETTERS, max_size=3)), STOPS, st.booleans())
def test_streamed_text_stops_where_the_whole_text_stops(
    chunks: list[str], stops: tuple[str, ...], is_included: bool
) -> None:
    watcher = StopWatcher(StopRule(stops, is_included))
    reported = ""

    for number, chunk in enumerate(chunks, start=1):
        if watcher.found is None:
            reported += watcher.push(chunk, number)
    if watcher.found is None:
        reported += watcher.flush()

    assert (reported, watcher.found) == cut_at_first_stop("".join(chunks), stops, is_included)


def cut_at_first_stop(
    text: str, stops: tuple[str, ...], is_included: bool
) -> tuple[str, str | None]:
    """Cut letter by letter at the first complete stop string, the longest if several are."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if is_included else end - len(longest)], longest
    return text, None
