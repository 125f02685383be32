"""Token budget of a step: the only place that decides how many tokens a prompt gets. Pure."""

from __future__ import annotations

from typing import NamedTuple

from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.request import Request

# Short prompts arrive in groups. After one, chunks stay within the threshold for this many steps,
# so that the next one waits for a small step at most.
NUM_STEPS_AFTER_SHORT = 32
# Tokens of prompts that are only looked up in a step: prefetches, and prompts that wait for a load.
# A look-up takes about 0.1 us a token, so that a flood of them would delay decoding.
MAX_LOOKED_UP_TOKENS = 32_768
# Computed in any step, so that prefills make progress.
LEAST_TOKENS = 16
FIRST_TOKENS = 64  # until the cost of a token is known
FIRST_PACED_TOKENS = 32
# Duration of a step of paced prompts while no request decodes. A request whose KV lands meanwhile,
# and whose client has its first token, waits for the end of the step.
PACED_STEP_S = 0.1
SMOOTHING = 0.25


class PromptBudget:
    """Divides the tokens of a step among prompts, and counts what they get.

    Prompts are served in order of priority and then of arrival, in two rounds:

    1. Long prompts, which lack more tokens than `long_prefill_token_threshold`, get half of the
       step at most, each no more than the threshold, and only the most urgent of them. The others
       get the rest.
    2. Long prompts get what is left. While short ones arrive, the threshold holds all the same.

    So the first of the short prompts and the first of the long ones, in this order, get at least
    half of each step until they are complete, whatever else waits or is in progress.

    A step has what `max_num_batched_tokens` leaves after one token for each decoding request, and
    what fits into the target step time, while others decode (`StepPace`). A paced prompt gets what
    takes about as long as the decoding requests.

    A waiting prompt gets nothing, and waits, if those of its length that are served before it would
    leave too many of them incomplete, or if prompts must not be split and it does not fit.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        limits = config.max_num_partial_prefills, config.max_long_partial_prefills
        self._max_long_partial = min((each for each in limits if each is not None), default=None)
        self.pace = StepPace(config.target_step_s)
        self._num_decoding = 0
        self._num_given = 0
        self._num_left = 0
        self._num_left_for_long = 0
        self._num_halves = 0  # that the long prompts got too few in the last step: 0 or 1
        self._num_left_for_paced = 0
        self._num_looked_up = 0
        self._is_leftover = False  # the second round
        # Prompts that were served in this step, and remain incomplete after it.
        self._num_short_partial = 0
        self._long_partial: dict[Request, None] = {}
        self._num_steps_kept_small = NUM_STEPS_AFTER_SHORT  # since the last short prompt

    def begin_step(self, num_decoding: int) -> None:
        """Begin a step in which this many requests get a token to decode."""
        # The last step left long prompts incomplete, and tokens for short ones.
        self._num_steps_kept_small += bool(self._num_left and self._long_partial)
        self._num_decoding, self._num_given = num_decoding, 0
        num_free = self._config.max_num_batched_tokens - num_decoding
        self._num_left = self.pace.prompt_tokens(num_decoding, num_free)
        self._num_left_for_long, self._num_halves = divmod(self._num_left + self._num_halves, 2)
        self._num_left_for_paced = self.pace.paced_tokens(num_decoding, self._num_left)
        self._num_looked_up = 0
        self._is_leftover = False
        self._num_short_partial, self._long_partial = 0, {}

    def begin_leftover(self) -> bool:
        """Begin the second round. Returns False if no tokens are left for it."""
        self._is_leftover = True
        self._num_left_for_long = self._num_left
        return self._num_left > 0

    @property
    def load(self) -> StepLoad:
        """The work of the step, as far as it is planned."""
        return StepLoad(self._num_decoding, self._num_given)

    # --- what a prompt may get ----------------------------------------------------

    @property
    def is_spent(self) -> bool:
        return self._num_left < 1

    @property
    def num_left_in_step(self) -> int:
        """Tokens that the step can still compute, whatever the shares of prompts and its pace."""
        return self._config.max_num_batched_tokens - self._num_decoding - self._num_given

    def next_chunk(self, request: Request, num_missing: int, num_given: int = 0) -> int:
        """Return what a prompt gets now, in tokens, after `num_given` in the first round."""
        limit = self._num_left
        if request.is_paced and self._config.enable_chunked_prefill:
            # At least one token, so that it does not block the requests behind it.
            limit = min(limit, max(0 if num_given else 1, self._num_left_for_paced))
        if request.is_long:
            limit = min(limit, self._max_for_long(request, num_given))
        return min(num_missing, limit)

    def _max_for_long(self, request: Request, num_given: int) -> int:
        first = next(iter(self._long_partial), request)
        if not self._is_leftover and first.rank[0] < request.rank[0]:
            return 0
        if self._is_leftover and self._num_steps_kept_small >= NUM_STEPS_AFTER_SHORT:
            return self._num_left_for_long
        threshold = self._config.long_prefill_token_threshold
        return min(self._num_left_for_long, max(0, threshold - num_given))

    def first_chunk(self, request: Request, num_missing: int) -> int:
        """Return the first chunk of a waiting prompt, in tokens; 0 if it must wait."""
        config = self._config
        # A resumed request can have outgrown the budget: it is chunked nevertheless.
        if not config.enable_chunked_prefill and num_missing <= config.max_num_batched_tokens:
            return num_missing if num_missing <= self._num_left else 0
        chunk = self.next_chunk(request, num_missing)
        if chunk == num_missing or request.is_long:
            return chunk
        limit = config.max_num_partial_prefills
        return chunk if limit is None or self._num_short_partial < limit else 0

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens get what prompts leave over. Steps filled with prompt tokens have none."""
        if not self._config.num_lookahead_tokens or not self._num_decoding:
            return 0
        return self.num_left_in_step

    # --- what a prompt was given --------------------------------------------------

    def give(self, request: Request, num_tokens: int, num_missing: int) -> None:
        """Count tokens of a prompt that lacked `num_missing` tokens before.

        A whole picture can have more than the prompt's share.
        """
        self._num_given += num_tokens
        self._num_left = max(0, self._num_left - num_tokens)
        if request.is_paced:
            self._num_left_for_paced -= num_tokens
        is_partial = num_tokens < num_missing
        if not request.is_long:
            self._num_short_partial += is_partial
            return
        self._num_left_for_long = max(0, self._num_left_for_long - num_tokens)
        if is_partial:
            self._long_partial[request] = None
        else:
            self._long_partial.pop(request, None)

    # --- long and short prompts ---------------------------------------------------

    @property
    def long_partial(self) -> list[Request]:
        """Long prompts that were served in this step and are incomplete, in order."""
        return list(self._long_partial)

    def allows_long(self, request: Request) -> bool:
        """Return whether this long prompt may start. Short ones overtake it while it waits."""
        limit = self._max_long_partial
        is_allowed = limit is None or len(self._long_partial) < limit
        return is_allowed and self._max_for_long(request, 0) > 0

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


class StepLoad(NamedTuple):
    """Work of a step."""

    num_decoding: int
    num_prompt_tokens: int


class StepPace:
    """Estimates, from past steps, the time of decoding and the time that a prefill token adds."""

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._decoding_s: float | None = None  # duration of a step without prefill
        self.token_s: float | None = None  # that a prompt token adds to a step; None: not known yet

    def prompt_tokens(self, num_decoding: int, budget: int) -> int:
        """Return the limit of prefill tokens in the next step: `budget` if no request decodes."""
        if self._target_s is None or not num_decoding:
            return budget
        if self.token_s is None:
            return min(budget, FIRST_TOKENS)
        room_s = self._target_s - (self._decoding_s or 0.0)
        return min(budget, max(LEAST_TOKENS, int(room_s / self.token_s)))

    def paced_tokens(self, num_decoding: int, budget: int) -> int:
        """Return the limit for paced prompts.

        They take about as long as decoding, or PACED_STEP_S if no request decodes.
        """
        allowed_s = self._decoding_s if num_decoding else PACED_STEP_S
        if self.token_s is None or allowed_s is None:
            return min(budget, FIRST_PACED_TOKENS)
        return min(budget, max(LEAST_TOKENS, int(allowed_s / self.token_s)))

    def record_step(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Record the duration of a step."""
        if num_prompt_tokens:
            others_s = (self._decoding_s or 0.0) if num_decoding else 0.0
            # A step faster than one without prefill still shows that tokens are cheap.
            added_s = max(seconds - others_s, 0.1 * seconds)
            self.token_s = _moving_average(self.token_s, added_s / num_prompt_tokens)
        elif num_decoding:
            self._decoding_s = _moving_average(self._decoding_s, seconds)


def _moving_average(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
