"""Token budget of one step, divided among prompts."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.prompt_budget import MAX_LOOKED_UP_TOKENS, PromptBudget
from baton.engine.scheduler.request import Request
from tests.support.requests import make_engine_request, make_request

PROMPT = make_request()


def test_a_chunk_is_the_minimum_of_missing_tokens_budget_and_threshold() -> None:
    budget = _budget(12, long_prefill_token_threshold=5)
    nearly_spent = _budget(12, num_decoding=4, long_prefill_token_threshold=5)

    chunks = [
        budget.next_chunk(_long(), 3),
        nearly_spent.next_chunk(_long(), 9),
        budget.next_chunk(_long(), 9),
    ]

    assert chunks == [3, 4, 5]


def test_long_prompts_share_half_of_a_step_and_get_what_others_leave() -> None:
    budget = _budget(12, long_prefill_token_threshold=5)
    first, second = _long(), _long()
    for each in (first, second):
        budget.give(each, budget.next_chunk(each, 99), num_missing=99)
    left_for_others = budget.next_chunk(PROMPT, 99)
    budget.give(PROMPT, 4, num_missing=4)

    has_leftover = budget.begin_leftover()

    assert (left_for_others, has_leftover, budget.long_partial) == (6, True, [first, second])
    assert budget.next_chunk(first, 94, num_given=5) == 2


def test_leftover_stays_within_the_threshold_after_a_short_prompt() -> None:
    budget = _budget(12, long_prefill_token_threshold=5)
    long = _long()
    budget.note_start(PROMPT)

    budget.give(long, 2, num_missing=99)
    budget.begin_leftover()

    assert budget.next_chunk(long, 97, num_given=2) == 3


def test_without_chunks_a_prompt_is_taken_whole_or_not_at_all() -> None:
    empty = _budget(8, enable_chunked_prefill=False)
    with_decoding = _budget(8, num_decoding=1, enable_chunked_prefill=False)

    assert [empty.first_chunk(PROMPT, 8), with_decoding.first_chunk(PROMPT, 8)] == [8, 0]
    # More than any step can take: it would wait for ever.
    assert with_decoding.first_chunk(PROMPT, 9) == 7


def test_at_the_partial_prefill_limit_only_prompts_of_one_chunk_start() -> None:
    budget = _budget(9, max_num_partial_prefills=1)
    budget.give(PROMPT, 1, num_missing=2)

    assert [budget.first_chunk(PROMPT, 9), budget.first_chunk(PROMPT, 8)] == [0, 8]


def test_each_step_starts_a_new_count() -> None:
    budget = _budget(8, max_num_partial_prefills=1)
    budget.give(PROMPT, 1, num_missing=2)

    budget.begin_step(num_decoding=0)

    assert budget.first_chunk(PROMPT, 9) == 8


def test_a_prompt_is_long_beyond_the_threshold_and_never_without_one() -> None:
    with_threshold, without = _budget(long_prefill_token_threshold=5), _budget()

    assert [with_threshold.is_long(5), with_threshold.is_long(6), without.is_long(999)] == [
        False,
        True,
        False,
    ]


def test_long_prompts_count_as_partial_prefills_only_between_their_chunks() -> None:
    budget = _budget(long_prefill_token_threshold=5, max_long_partial_prefills=1)
    long = _long()

    budget.give(long, 6, num_missing=6)
    after_its_end = budget.allows_long(_long())
    budget.give(long, 5, num_missing=6)
    while_part_done = budget.allows_long(_long())
    budget.give(long, 1, num_missing=1)

    assert (after_its_end, while_part_done, budget.allows_long(_long())) == (True, False, True)


def test_draft_tokens_get_the_budget_that_prompts_leave() -> None:
    budget = _budget(20, num_decoding=2, num_lookahead_tokens=3)
    budget.give(PROMPT, 7, num_missing=9)

    assert budget.num_draft_tokens == 11
    assert _budget(20, num_decoding=2).num_draft_tokens == 0
    assert _budget(20, num_lookahead_tokens=3).num_draft_tokens == 0


def test_a_paced_prompt_leaves_the_remaining_budget_to_others() -> None:
    budget = _budget(200, num_decoding=1)
    paced = _paced()

    chunk = budget.first_chunk(paced, 150)
    budget.give(paced, chunk, num_missing=150)

    assert chunk == 32
    assert budget.first_chunk(PROMPT, 150) == 150
    assert budget.next_chunk(paced, 100, num_given=chunk) == 0


def test_prefix_look_ups_are_limited_per_step() -> None:
    budget = _budget()
    long = make_request(range(MAX_LOOKED_UP_TOKENS))

    before = budget.are_look_ups_spent
    budget.note_look_up(long)
    after = budget.are_look_ups_spent
    budget.begin_step(num_decoding=0)

    assert (before, after, budget.are_look_ups_spent) == (False, True, False)


def _budget(num_tokens: int = 2048, num_decoding: int = 0, **options: object) -> PromptBudget:
    """Return the budget of a step of so many tokens."""
    config = replace(
        SchedulerConfig(max_num_batched_tokens=num_tokens, max_num_seqs=1),
        **options,  # type: ignore[arg-type]
    )
    budget = PromptBudget(config)
    budget.begin_step(num_decoding)
    return budget


def _long() -> Request:
    request = make_request()
    request.is_long = True
    return request


def _paced() -> Request:
    request = make_request()
    request.submitted = replace(make_engine_request(), is_paced=True)
    return request
