"""What is asked of the engine and what it answers, as values. No torch, clock or thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

from engine.sampling import SamplingParams
from kv_transfer.types import HandoffId, Peer, TokenLogprobs

RequestId = NewType("RequestId", str)
ClientId = NewType("ClientId", str)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One sequence to continue, as it enters the engine."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # randomness is keyed by (seed, position), so no request may lack one
    arrival_s: float = 0.0
    age_s: float = 0.0  # since its client sent it: a later try keeps its place by arrival
    client_id: ClientId = ClientId("")
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    # Tokens that this request was already given elsewhere (a migrated stream): they are
    # context like the prompt, but count as output for penalties, limits and positions.
    prior_output_token_ids: tuple[int, ...] = ()
    receive_from: ReceiveKv | None = None
    send_to: HandoffId | None = None
    is_paced: bool = False  # its prompt may about double the time of a step in which others decode


@dataclass(frozen=True, slots=True)
class ReceiveKv:
    """The prompt's KV will be written by a peer under this hand-off."""

    handoff_id: HandoffId
    source: Peer


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    # A sender's part ends with its first token; the peer that gets the KV goes on.
    HANDED_OFF = "handed_off"


@dataclass(frozen=True, slots=True)
class Served:
    """What it took this engine to serve one request."""

    num_cached_tokens: int  # of its first tokens, found in the prefix cache
    num_received_tokens: int  # of its first tokens, written by a peer
    num_prefilled_tokens: int  # computed here in prefill chunks, again after preemption too
    num_preemptions: int
    num_proposed_tokens: int = 0  # by speculation
    num_accepted_tokens: int = 0  # of these: they came true


class Output(NamedTuple):
    """What one request got from one step. A tuple, because a thousand are made per step."""

    request_id: RequestId
    first_index: int  # place of token_ids[0] among the request's output tokens
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    error: str | None = None
    is_refused: bool = False  # with an error that is the request's own fault
    served: Served | None = None  # with the finish reason
    has_crashed: bool = False  # with an error: a pass fails whenever the request is in it
    first_prompt_index: int = 0  # place of prompt_logprobs[0] among the prompt's tokens
    is_kv_lost: bool = False  # with an error: the KV of its prompt did not arrive


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The outputs of one step, by the client that waits for them."""

    by_client: dict[ClientId, list[Output]] = field(default_factory=dict)
