"""JSON encoding of Done for the notification that a one-sided transport sends behind the data.

The data path is not authenticated, so every field is validated when decoding.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from baton.core.ids import HandoffId
from baton.core.logprobs import FirstToken, TokenLogprobs
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.protocol.messages import Done

T = TypeVar("T")


def note_of(done: Done) -> bytes:
    first = done.first_token
    return json.dumps(
        [
            done.handoff_id.request_id,
            done.handoff_id.attempt,
            done.num_tokens,
            done.digest,
            None if first is None else first.token_id,
            None if first is None else _logprobs_to(first.logprobs),
        ]
    ).encode()


def decode_done(note: bytes) -> Done:
    """Decode a notification. Raise PeerUnreachable if it is invalid, so that the pair is cut."""
    try:
        request_id, attempt, num_tokens, digest, token_id, logprobs = json.loads(note)
        return Done(
            HandoffId(_check_type(str, request_id), _check_type(int, attempt)),
            _check_type(int, num_tokens),
            None
            if token_id is None
            else FirstToken(_check_type(int, token_id), _logprobs_of(logprobs)),
            None if digest is None else _check_type(int, digest),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerUnreachable(f"the peer's notification cannot be read: {error}") from error


def _logprobs_to(logprobs: TokenLogprobs | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [logprobs.token_id, logprobs.logprob, logprobs.rank, logprobs.top]


def _logprobs_of(encoded: Any) -> TokenLogprobs | None:
    if encoded is None:
        return None
    token_id, logprob, rank, top = encoded
    pairs = tuple((_check_type(int, token), _check_type(float, value)) for token, value in top)
    return TokenLogprobs(
        _check_type(int, token_id), _check_type(float, logprob), _check_type(int, rank), pairs
    )


def _check_type(kind: type[T], value: Any) -> T:
    # Not isinstance: True is an int, and would pass as a token id.
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
