"""Whether what a request asks for can be told in one message. Pure."""

from __future__ import annotations

from engine.errors import InvalidRequest
from serving.sizes import MAX_MESSAGE_BYTES

# The most that protobuf takes for one entry of TokenLogprobs.top, and for what is around them.
TOP_BYTES = 17
TOKEN_BYTES = 40


def check_prompt_logprobs_fit(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """They are told all at once, with the first token. Raises InvalidRequest."""
    if prompt_logprobs is None:
        return
    per_token = TOKEN_BYTES + TOP_BYTES * prompt_logprobs
    if num_prompt_tokens * per_token > MAX_MESSAGE_BYTES:
        num_most = max(0, (MAX_MESSAGE_BYTES // num_prompt_tokens - TOKEN_BYTES) // TOP_BYTES)
        raise InvalidRequest(
            f"prompt_logprobs is {prompt_logprobs}: with {num_prompt_tokens} prompt tokens that is "
            f"more than a message may hold ({MAX_MESSAGE_BYTES >> 20} MiB); ask for at most "
            f"{num_most}, or leave it out"
        )
