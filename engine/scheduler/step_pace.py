"""Limit of prefill tokens per step, so that steps stay short for decoding requests."""

from __future__ import annotations

from typing import NamedTuple

# Computed in any step, so that prefills make progress.
LEAST_TOKENS = 16
FIRST_TOKENS = 64  # until the cost of a token is known
FIRST_PACED_TOKENS = 32
# Duration of a step of paced prompts while no request decodes. A request whose KV lands meanwhile,
# and whose client has its first token, waits for the end of the step.
PACED_STEP_S = 0.1
SMOOTHING = 0.25


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
