"""Limits on the chunk size and on the number of incomplete prefills."""

from __future__ import annotations

from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.request import Request

# Short prompts arrive in groups. After one, chunks stay within the threshold for this many steps,
# so that the next one waits for a small step at most.
NUM_STEPS_AFTER_SHORT = 32


class PrefillLimits:
    """Counts the prefills that remain incomplete after the step being planned."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_partial = 0
        self._num_long = 0
        self._num_steps_kept_small = NUM_STEPS_AFTER_SHORT  # since the last short prompt

    def begin_step(self) -> None:
        self._num_partial = 0
        self._num_long = 0

    @property
    def allows_long(self) -> bool:
        limit = self._config.max_long_partial_prefills
        return limit is None or self._num_long < limit

    def is_long(self, num_missing: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_missing

    def min_cached_to_be_short(self, num_tokens: int) -> int:
        """Return the number of tokens that must be cached for a prompt to count as short."""
        return num_tokens - self._config.long_prefill_token_threshold

    def next_chunk(self, num_missing: int, budget: int) -> int:
        """Return the next chunk of a prefill in progress, in tokens."""
        threshold = self._config.long_prefill_token_threshold
        return min(num_missing, budget, threshold or budget)

    def first_chunk(self, num_missing: int, budget: int) -> int:
        """Return the first chunk of a prefill, in tokens; 0 if it must wait."""
        config = self._config
        if not config.enable_chunked_prefill:
            # A resumed request can have outgrown the budget: it is chunked nevertheless.
            can_be_whole = num_missing <= config.max_num_batched_tokens
            if can_be_whole:
                return num_missing if num_missing <= budget else 0
        chunk = self.next_chunk(num_missing, budget)
        limit = config.max_num_partial_prefills
        is_full = limit is not None and self._num_partial >= limit
        return 0 if is_full and chunk < num_missing else chunk

    def record_short(self) -> None:
        """Record that a short prompt was scheduled."""
        self._num_steps_kept_small = 0

    def allows_leftover(self) -> bool:
        """Return whether prefills limited by the threshold can use this step's leftover budget.

        Must be called at most once per step, after the waiting requests were scheduled.
        """
        if not self._num_partial:
            return False
        if self._num_steps_kept_small >= NUM_STEPS_AFTER_SHORT:
            return True
        self._num_steps_kept_small += 1
        return False

    def count(self, request: Request, num_left: int) -> None:
        """Count a prefill of which `num_left` tokens remain after this step."""
        if num_left:
            self._num_partial += 1
            self._num_long += request.is_long

    def undo_count(self, request: Request) -> None:
        """Undo the count of a prefill that this step completes after all."""
        self._num_partial -= 1
        self._num_long -= request.is_long
