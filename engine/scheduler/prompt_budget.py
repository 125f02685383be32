"""Token budget of a step: the only place that decides how many tokens a prompt gets. Pure."""

from __future__ import annotations

from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step_pace import StepLoad, StepPace

# Short prompts arrive in groups. After one, chunks stay within the threshold for this many steps,
# so that the next one waits for a small step at most.
NUM_STEPS_AFTER_SHORT = 32
# Tokens of prompts that are only looked up in a step: prefetches, and prompts that wait for a load.
# A look-up takes about 0.1 us a token, so that a flood of them would delay decoding.
MAX_LOOKED_UP_TOKENS = 32_768


class PromptBudget:
    """Divides the tokens of a step among prompts, and counts what they get.

    A prompt gets the minimum of these:

    - what is left of `max_num_batched_tokens` after one token for each decoding request
    - what fits into the target step time, while others decode (`StepPace`)
    - if it is paced: what takes about as long as the decoding requests
    - `long_prefill_token_threshold`. What is left at the end of a step goes to the prompts that
      this limited, unless short prompts are arriving

    A waiting prompt gets nothing, and waits, if it would be one incomplete prefill too many, or if
    prompts must not be split and it does not fit.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.pace = StepPace(config.target_step_s)
        self._num_decoding = 0
        self._num_given = 0
        self._num_left = 0
        self._num_paced_left = 0  # the part of it for paced prompts
        self._num_looked_up = 0
        # Prefills that remain incomplete after this step, and the long ones among them.
        self._num_partial = self._num_long = 0
        self._num_steps_kept_small = NUM_STEPS_AFTER_SHORT  # since the last short prompt

    def begin_step(self, num_decoding: int) -> None:
        """Begin a step in which this many requests get a token to decode."""
        self._num_decoding, self._num_given = num_decoding, 0
        num_free = self._config.max_num_batched_tokens - num_decoding
        self._num_left = self.pace.prompt_tokens(num_decoding, num_free)
        self._num_paced_left = self.pace.paced_tokens(num_decoding, self._num_left)
        self._num_looked_up = self._num_partial = self._num_long = 0

    @property
    def load(self) -> StepLoad:
        """The work of the step, as far as it is planned."""
        return StepLoad(self._num_decoding, self._num_given)

    # --- what a prompt may get ----------------------------------------------------

    @property
    def is_spent(self) -> bool:
        return self._num_left < 1

    def next_chunk(self, request: Request, num_missing: int) -> int:
        """Return the next chunk of a prefill in progress, in tokens."""
        num_left = self._left_for(request)
        return min(num_missing, num_left, self._config.long_prefill_token_threshold or num_left)

    def first_chunk(self, request: Request, num_missing: int) -> int:
        """Return the first chunk of a waiting prompt, in tokens; 0 if it must wait."""
        config = self._config
        # A resumed request can have outgrown the budget: it is chunked nevertheless.
        if not config.enable_chunked_prefill and num_missing <= config.max_num_batched_tokens:
            return num_missing if num_missing <= self._num_left else 0
        chunk = self.next_chunk(request, num_missing)
        limit = config.max_num_partial_prefills
        is_full = limit is not None and self._num_partial >= limit
        return 0 if is_full and chunk < num_missing else chunk

    def extension(self, request: Request, num_missing: int) -> int:
        """Return the tokens by which a chunk of this step can grow beyond the threshold."""
        return 0 if request.is_paced else min(num_missing, self._num_left)

    def releases_leftover(self) -> bool:
        """Return whether chunks can grow by what this step leaves over.

        Must be called at most once per step, after the waiting requests were scheduled.
        """
        if not self._num_left or not self._num_partial:
            return False
        if self._num_steps_kept_small >= NUM_STEPS_AFTER_SHORT:
            return True
        self._num_steps_kept_small += 1
        return False

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens get what prompts leave over. Steps filled with prompt tokens have none."""
        if not self._config.num_lookahead_tokens or not self._num_decoding:
            return 0
        return self._config.max_num_batched_tokens - self._num_decoding - self._num_given

    def _left_for(self, request: Request) -> int:
        if not (request.is_paced and self._config.enable_chunked_prefill):
            return self._num_left
        # At least one token, so that it does not block the requests behind it.
        return min(self._num_left, max(1, self._num_paced_left))

    # --- what a prompt was given --------------------------------------------------

    def give(self, request: Request, num_tokens: int, num_missing: int) -> None:
        """Count a chunk of a prompt that lacked `num_missing` tokens before."""
        self._spend(request, num_tokens)
        if num_tokens < num_missing:
            self._num_partial += 1
            self._num_long += request.is_long

    def extend(self, request: Request, num_tokens: int, num_missing: int) -> None:
        """Count the growth of a chunk, to whose prompt `num_missing` tokens were lacking still."""
        self._spend(request, num_tokens)
        if num_tokens == num_missing:  # it is complete after all
            self._num_partial -= 1
            self._num_long -= request.is_long

    def _spend(self, request: Request, num_tokens: int) -> None:
        self._num_given += num_tokens
        self._num_left -= num_tokens
        if request.is_paced:
            self._num_paced_left -= num_tokens

    # --- long and short prompts ---------------------------------------------------

    @property
    def allows_long(self) -> bool:
        """True if one more long prompt may start. Short ones overtake those that wait for it."""
        limit = self._config.max_long_partial_prefills
        return limit is None or self._num_long < limit

    def is_long(self, num_missing: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_missing

    def note_start(self, request: Request) -> None:
        """Note that a prompt was started: others may follow a short one soon."""
        if not request.is_long:
            self._num_steps_kept_small = 0

    # --- look-ups -----------------------------------------------------------------

    @property
    def are_look_ups_spent(self) -> bool:
        return self._num_looked_up >= MAX_LOOKED_UP_TOKENS

    def note_look_up(self, request: Request) -> None:
        """Count a request that was looked up, and gets no token in this step."""
        self._num_looked_up += request.num_tokens
