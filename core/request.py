"""Requests to the engine, and their tasks, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import (
    NO_ADAPTER,
    AdapterRef,
    HandoffId,
    Peer,
    PrefixKeys,
    RequestId,
)
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.media import MediaSegment, Picture
from baton.core.sampling import SamplingParams


class TaskOutput(Enum):
    """Result that a request ends with, besides its statistics."""

    TOKENS = "tokens"
    KV = "kv"  # in the KV cache of its node; no token is computed
    VECTOR = "vector"  # pooled from the hidden states of the prompt
    VECTORS = "vectors"  # one for each token of the prompt
    ENCODING = "encoding"  # of a picture, in the KV cache of its node


@dataclass(frozen=True, slots=True)
class Task:
    """Kind of request. Rooms ask for its properties, not for its name."""

    name: str
    output: TaskOutput
    # A request has a leg on the node that computes its prompt. With a decode leg, another node can
    # receive the KV and continue.
    has_decode_leg: bool
    sampling: SamplingParams | None = None  # of all its requests; None: their own
    is_pooling: ClassVar[bool] = False  # runners ask for it once per row and pass


@dataclass(frozen=True, slots=True)
class EmbedTask(Task):
    """Task of a text, or of a pair of texts that are scored together."""

    is_pooling: ClassVar[bool] = True
    second_text_start: int = 0  # index of the second text's first token; 0: it is no pair


GENERATE = Task("generate", TaskOutput.TOKENS, has_decode_leg=True)
# Of requests that sample no token; `max_tokens` must be positive.
UNSAMPLED = SamplingParams(max_tokens=1)

PREFETCH = Task("prefetch", TaskOutput.KV, has_decode_leg=False, sampling=UNSAMPLED)
ENCODE = Task("encode", TaskOutput.ENCODING, has_decode_leg=False, sampling=UNSAMPLED)
EMBED = EmbedTask("embed", TaskOutput.VECTOR, has_decode_leg=False, sampling=UNSAMPLED)
TOKEN_EMBED = EmbedTask("token_embed", TaskOutput.VECTORS, has_decode_leg=False, sampling=UNSAMPLED)


def task_of(hints: KvHints) -> Task:
    """Return the task of a prompt to generate from. Clients ask for a prefetch by its hints."""
    return PREFETCH if hints.prefetch else GENERATE


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as submitted to the engine: one sequence to continue, or to embed."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # sampling is keyed by (seed, position), so every request needs one
    task: Task = GENERATE
    arrival_s: float = 0.0
    age_s: float = 0.0  # since the client sent it, so that a retry keeps its place in the queue
    priority: int = 0  # lower runs earlier
    adapter: AdapterRef = NO_ADAPTER  # of the served model
    media: tuple[MediaSegment, ...] = ()  # in the prompt
    pictures: tuple[Picture, ...] = ()  # of the media; none where KV of the prompt arrives
    cache_salt: str = ""
    tenant: str = ""  # owner of the salt, to whose quota its blocks count; empty: the salt itself
    client: str = ""  # opaque; clients share the KV cache equally while it is full
    kv_hints: KvHints = NO_KV_HINTS
    # Output tokens generated on other nodes (a migrated stream). They are context like the
    # prompt, but count as output for penalties, limits and positions.
    prior_output_token_ids: tuple[int, ...] = ()
    predicted_token_ids: tuple[int, ...] = ()  # that the output is likely to repeat: drafts
    receive_from: ReceiveKv | None = None
    send_to: HandoffId | None = None
    prefix_source: PrefixSource | None = None
    foreign_kv: ForeignKv | None = None  # of its prompt, on a server that is not Baton's
    # Limits its prefill chunks to about the time that decoding takes in the same step.
    is_paced: bool = False
    registration: int = 0  # copied to its outputs; names the stream that gets them

    @property
    def prefix_keys(self) -> PrefixKeys:
        return PrefixKeys(self.cache_salt, self.adapter.id, self.media)


@dataclass(frozen=True, slots=True)
class ReceiveKv:
    """Hand-off under which a peer writes the KV of the prompt."""

    handoff_id: HandoffId
    source: Peer


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Peer that probably has KV of the request's prefix, which this node may pull from it."""

    peer: Peer
    num_tokens: int  # leading tokens of the request whose KV the peer probably has
