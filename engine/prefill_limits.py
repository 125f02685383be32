"""How much of a prompt one step takes, and how many prompts may be part done at once."""

from __future__ import annotations

from engine.lifecycle import Request
from engine.scheduler_config import SchedulerConfig

# Short prompts come in company: when one came, long ones keep to the threshold in so many steps,
# so that the next one waits for a small step at most.
NUM_STEPS_AFTER_SHORT = 32


class PrefillLimits:
    """Counts the prompts that will be part done after the step that is being planned."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_partial = 0
        self._num_long = 0
        self._num_steps_kept_small = NUM_STEPS_AFTER_SHORT  # for the sake of short prompts

    def begin_step(self) -> None:
        self._num_partial = 0
        self._num_long = 0

    @property
    def allows_long(self) -> bool:
        limit = self._config.max_long_partial_prefills
        return limit is None or self._num_long < limit

    def is_long(self, num_missing: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_missing

    def num_tokens_that_make_short(self, num_tokens: int) -> int:
        """How many of its tokens must be cached for a prompt not to be a long one."""
        return num_tokens - self._config.long_prefill_token_threshold

    def next_chunk(self, num_missing: int, budget: int) -> int:
        """Of a prompt that was begun."""
        threshold = self._config.long_prefill_token_threshold
        return min(num_missing, budget, threshold or budget)

    def first_chunk(self, num_missing: int, budget: int) -> int:
        """Of a prompt not begun; 0 if it must wait."""
        config = self._config
        if not config.enable_chunked_prefill:
            # A resumed request may have outgrown every budget: it is chunked all the same.
            can_be_whole = num_missing <= config.max_num_batched_tokens
            if can_be_whole:
                return num_missing if num_missing <= budget else 0
        chunk = self.next_chunk(num_missing, budget)
        limit = config.max_num_partial_prefills
        is_full = limit is not None and self._num_partial >= limit
        return 0 if is_full and chunk < num_missing else chunk

    def took_short(self) -> None:
        """A short prompt was taken: others may follow."""
        self._num_steps_kept_small = 0

    def allow_rest(self) -> bool:
        """Whether the prompts that are cut short in this step may have the rest of its budget.

        Called at most once for a step, when all that wait have had their turn.
        """
        if not self._num_partial:
            return False
        if self._num_steps_kept_small >= NUM_STEPS_AFTER_SHORT:
            return True
        self._num_steps_kept_small += 1
        return False

    def count(self, request: Request, num_left: int) -> None:
        """So many of its tokens are left after this step."""
        if num_left:
            self._num_partial += 1
            self._num_long += request.is_long

    def uncount(self, request: Request) -> None:
        """None of its tokens are left after this step, unlike what was counted."""
        self._num_partial -= 1
        self._num_long -= request.is_long
