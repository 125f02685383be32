"""Size limits of what one request may have returned. Pure."""

from __future__ import annotations

from errors import InvalidRequest
from rpc.messages.limits import MAX_MESSAGE_BYTES

# Upper bounds of protobuf's bytes for an entry of TokenLogprobs.top, and for the rest of a token.
TOP_BYTES = 17
TOKEN_BYTES = 40
# Limit of the logprobs in one HTTP body, for generated tokens and prompts separately. Each makes
# about 35 MB of JSON.
MAX_LOGPROBS_PER_REQUEST = 1 << 19


class LogprobBudget:
    """Remaining number of prompt logprobs that the answers of one request may return in total."""

    def __init__(self, num_answers: int = 1) -> None:
        self._num_answers = num_answers  # to each prompt, which all repeat its logprobs
        self._num_left = MAX_LOGPROBS_PER_REQUEST

    def spend(self, num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
        """Deduct the logprobs of one prompt for all answers to it.

        Raises InvalidRequest if too few are left.
        """
        if prompt_logprobs is None:
            return
        num_answers = self._num_answers
        num_logprobs = num_prompt_tokens * (prompt_logprobs + 1) * num_answers
        if num_logprobs > self._num_left:
            raise InvalidRequest(
                f"prompt_logprobs is {prompt_logprobs}: {num_answers} answers to "
                f"{num_prompt_tokens} prompt tokens repeat {num_logprobs} logprobs; all answers of "
                f"a request may repeat {MAX_LOGPROBS_PER_REQUEST}, and {self._num_left} are left: "
                "lower prompt_logprobs or n, or shorten the prompt",
                "prompt_logprobs",
            )
        self._num_left -= num_logprobs


def max_tokens_with_logprobs(logprobs: int, num_answers: int) -> int:
    """Return the largest `max_tokens` with which the logprobs of all answers fit one HTTP body."""
    return max(1, MAX_LOGPROBS_PER_REQUEST // ((logprobs + 1) * num_answers))


def check_prompt_logprobs_fit(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """Check that prompt logprobs fit one message: they are sent together with the first token.

    Raises InvalidRequest.
    """
    if prompt_logprobs is None:
        return
    per_token = TOKEN_BYTES + TOP_BYTES * prompt_logprobs
    if num_prompt_tokens * per_token > MAX_MESSAGE_BYTES:
        num_max = max(0, (MAX_MESSAGE_BYTES // num_prompt_tokens - TOKEN_BYTES) // TOP_BYTES)
        raise InvalidRequest(
            f"prompt_logprobs is {prompt_logprobs}: with {num_prompt_tokens} prompt tokens that is "
            f"more than a message may hold ({MAX_MESSAGE_BYTES >> 20} MiB); ask for at most "
            f"{num_max}, or leave it out"
        )
