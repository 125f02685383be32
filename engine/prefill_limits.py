"""How much of a prompt one step takes, and how many prompts may be part done at once."""

from __future__ import annotations

from engine.lifecycle import Request
from engine.scheduler_config import SchedulerConfig


class PrefillLimits:
    """Counts the prompts that will be part done after the step that is being planned."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_partial = 0
        self._num_long = 0

    def begin_step(self) -> None:
        self._num_partial = 0
        self._num_long = 0

    @property
    def allows_long(self) -> bool:
        limit = self._config.max_long_partial_prefills
        return limit is None or self._num_long < limit

    def is_long(self, num_missing: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_missing

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

    def count(self, request: Request, num_left: int) -> None:
        """So many of its tokens are left after this step."""
        if num_left:
            self._num_partial += 1
            self._num_long += request.is_long
