"""Outputs of the engine, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from baton.core.ids import RequestId
from baton.core.logprobs import TokenLogprobs


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    # The sender is done after the first token; the peer that receives the KV continues.
    HANDED_OFF = "handed_off"


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of one request on this engine."""

    num_cached_tokens: int  # leading tokens found in the prefix cache
    num_received_tokens: int  # leading tokens whose KV a peer wrote
    num_prefilled_tokens: int  # computed in prefill chunks, including recomputation
    num_preemptions: int
    num_proposed_tokens: int = 0  # by speculation
    num_accepted_tokens: int = 0  # of the proposed ones
    # Of the cached prompt tokens: loaded from an external KV cache for this request, by tier.
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)


class FailureCause(Enum):
    """Cause of a request's failure. It decides whether the request can continue elsewhere."""

    MODEL = "model"  # non-finite logits, or a logits processor that failed
    REQUEST = "request"  # the request itself: it can never be served
    PASS = "pass"  # every pass that contains the request fails
    KV_LOST = "kv_lost"  # the KV of the prompt did not arrive, or was lost while it was sent
    ENGINE_STOPPED = "engine_stopped"  # not the request: the engine has ended
    ENGINE_KILLED = "engine_killed"  # the same, since a process that it needs was lost


class Failure(NamedTuple):
    """Reason why a request got no token and ends."""

    reason: str
    cause: FailureCause = FailureCause.MODEL


class Output(NamedTuple):
    """Output of one request in one step. A named tuple, since a step may create a thousand."""

    request_id: RequestId
    first_index: int  # index of token_ids[0] in the request's output tokens
    token_ids: tuple[int, ...] = ()
    registration: int = 0  # of the request; an id can be used again before its last output
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended the request, if any
    failure: Failure | None = None  # set together with FinishReason.ERROR
    served: RequestStats | None = None  # set together with finish_reason
    first_prompt_index: int = 0  # index of prompt_logprobs[0] in the prompt's tokens
    vector: bytes = b""  # or vectors of a pooled request: float32 in little-endian order
