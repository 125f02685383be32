"""Limits on the prompt tokens of one step."""

from __future__ import annotations

from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.prefill_limits import PrefillLimits
from tests.support.requests import make_request


def test_a_chunk_is_what_is_missing_what_is_left_or_the_threshold() -> None:
    limits = PrefillLimits(SchedulerConfig(long_prefill_token_threshold=5))

    assert [limits.next_chunk(3, 9), limits.next_chunk(9, 4), limits.next_chunk(9, 9)] == [3, 4, 5]


def test_without_chunks_a_prompt_is_taken_whole_or_not_at_all() -> None:
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=1, enable_chunked_prefill=False)
    limits = PrefillLimits(config)

    assert [limits.first_chunk(8, 8), limits.first_chunk(8, 7)] == [8, 0]
    # More than any step can take: it would wait for ever.
    assert limits.first_chunk(9, 7) == 7


def test_at_the_partial_prefill_limit_only_prompts_of_one_chunk_start() -> None:
    limits = PrefillLimits(SchedulerConfig(max_num_partial_prefills=1))
    limits.count(make_request(), num_left=1)

    assert [limits.first_chunk(9, 8), limits.first_chunk(8, 8)] == [0, 8]


def test_each_step_starts_a_new_count() -> None:
    limits = PrefillLimits(SchedulerConfig(max_num_partial_prefills=1))
    limits.count(make_request(), num_left=1)

    limits.begin_step()

    assert limits.first_chunk(9, 8) == 8


def test_a_prompt_is_long_beyond_the_threshold_and_never_without_one() -> None:
    with_threshold = PrefillLimits(SchedulerConfig(long_prefill_token_threshold=5))
    without = PrefillLimits(SchedulerConfig())

    assert [with_threshold.is_long(5), with_threshold.is_long(6), without.is_long(999)] == [
        False,
        True,
        False,
    ]


def test_long_ones_count_only_while_part_done() -> None:
    config = SchedulerConfig(long_prefill_token_threshold=5, max_long_partial_prefills=1)
    limits = PrefillLimits(config)
    long = make_request()
    long.is_long = True

    limits.count(long, num_left=0)
    after_its_end = limits.allows_long
    limits.count(long, num_left=1)

    assert (after_its_end, limits.allows_long) == (True, False)
