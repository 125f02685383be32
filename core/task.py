"""Tasks of requests: which legs one has, and what it ends with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from baton.core.kv_hints import KvHints
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
