"""Done as the bytes that a one-sided transport carries behind the data. JSON: a few dozen bytes.

What comes over the data path may be anybody's, so reading it believes nothing.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from kv_transfer.errors import PeerUnreachable
from kv_transfer.messages import Done
from kv_transfer.types import FirstToken, HandoffId, TokenLogprobs

T = TypeVar("T")


def note_of(done: Done) -> bytes:
    first = done.first_token
    return json.dumps(
        [
            done.handoff_id.request_id,
            done.handoff_id.attempt,
            done.num_tokens,
            done.digest,
            first.token_id,
            _logprobs_to(first.logprobs),
        ]
    ).encode()


def done_of(note: bytes) -> Done:
    """Raises PeerUnreachable if this is no Done: with such a peer nothing can be handed over."""
    try:
        request_id, attempt, num_tokens, digest, token_id, logprobs = json.loads(note)
        return Done(
            HandoffId(_is(str, request_id), _is(int, attempt)),
            _is(int, num_tokens),
            FirstToken(_is(int, token_id), _logprobs_of(logprobs)),
            None if digest is None else _is(int, digest),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerUnreachable(f"the peer's notification cannot be read: {error}") from error


def _logprobs_to(logprobs: TokenLogprobs | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [logprobs.token_id, logprobs.logprob, logprobs.rank, logprobs.top]


def _logprobs_of(written: Any) -> TokenLogprobs | None:
    if written is None:
        return None
    token_id, logprob, rank, top = written
    pairs = tuple((_is(int, token), _is(float, value)) for token, value in top)
    return TokenLogprobs(_is(int, token_id), _is(float, logprob), _is(int, rank), pairs)


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
