"""Outputs of the engine as values: tokens, their logprobs, and the end of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from baton.core.ids import RequestId

# Logprobs of generated tokens: before all sampling settings, or after them, as in vLLM.
RAW_LOGPROBS, PROCESSED_LOGPROBS = LOGPROBS_MODES = "raw_logprobs", "processed_logprobs"


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of one sampled token, and of the most likely tokens at its position."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token sampled by prefill, with its logprobs. Sent together with the KV."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    draft_state: bytes = b""  # from which a draft head goes on; empty: there is no head


@dataclass(frozen=True, slots=True)
class Served:
    """Nodes that served a request, and the KV transferred between them."""

    prefill_node: str  # empty: the decode node computed the prompt
    decode_node: str
    is_prefill_remote: bool
    prefill_reason: str  # for a prompt that no prefill node computed; else empty
    kv_bytes: int
    kv_blocks: int
    kv_transport: str
    prompt_tokens_computed_on_decode: int
    prompt_tokens_cached_on_decode: int
    attempts: int
    trace_id: str = ""  # empty: not traced
    tokens_proposed: int = 0  # by speculative decoding on the decode node
    tokens_accepted: int = 0  # of tokens_proposed
    # None without a prefill node, or if its count did not arrive soon after the last token.
    prompt_tokens_cached_on_prefill: int | None = None
    kv_conversion: str = ""  # of the prefill node's KV by the decode node; empty: none
    # Of the cached prompt tokens: loaded from outside the KV cache, by source, such as "host".
    prompt_tokens_loaded: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """Last part of an answer that is complete. Times are seconds since the router received it."""

    reason: FinishReason  # STOP or LENGTH
    num_prompt_tokens: int
    num_completion_tokens: int
    dispatched_s: float
    first_token_s: float  # 0: there was none, as with the next one
    first_decoded_token_s: float
    finished_s: float
    served: Served
    stop_token_id: int | None = None
    stop_string: str | None = None
    # Prompt tokens read from the prefix cache of the node that computed the others.
    num_cached_prompt_tokens: int | None = None
    warnings: tuple[str, ...] = ()  # what was done only in part, such as max_tokens lowered
