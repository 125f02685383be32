"""How many prompt tokens a step may take so that it ends in time for those that decode."""

from __future__ import annotations

# What is computed of prompts in any case, so that they come to their end, too.
LEAST_TOKENS = 16
FIRST_TOKENS = 64  # while it is not known what a token costs
FIRST_PACED_TOKENS = 32
WEIGHT_OF_NEWS = 0.25


class StepPace:
    """Learns from the steps themselves: what decoding takes, and what a prompt token adds to it."""

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._decoding_s: float | None = None  # a step without prompts
        self._token_s: float | None = None

    def prompt_tokens(self, num_decoding: int, most: int) -> int:
        """For the next step, at most so many. With nobody decoding, nobody waits for its end."""
        if self._target_s is None or not num_decoding:
            return most
        if self._token_s is None:
            return min(most, FIRST_TOKENS)
        room_s = self._target_s - (self._decoding_s or 0.0)
        return min(most, max(LEAST_TOKENS, int(room_s / self._token_s)))

    def paced_tokens(self, num_decoding: int, most: int) -> int:
        """Of paced prompts in the next step: they take about as long as decoding itself."""
        if not num_decoding:
            return most
        if self._token_s is None or self._decoding_s is None:
            return min(most, FIRST_PACED_TOKENS)
        return min(most, max(LEAST_TOKENS, int(self._decoding_s / self._token_s)))

    def took(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """A step ended."""
        if num_prompt_tokens:
            others_s = (self._decoding_s or 0.0) if num_decoding else 0.0
            # A step that was faster than one without prompts still tells that tokens are cheap.
            added_s = max(seconds - others_s, 0.1 * seconds)
            self._token_s = _mixed(self._token_s, added_s / num_prompt_tokens)
        elif num_decoding:
            self._decoding_s = _mixed(self._decoding_s, seconds)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + WEIGHT_OF_NEWS * (now - before)
