"""Requests and responses of the client, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from baton.core.errors import InvalidRequest
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.output import Finish, TokenLogprobs
from baton.core.sampling import Argument, SamplingDefaults, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.telemetry.names import TRACEPARENT

Message = Mapping[str, Any]  # role and content, and a list of images as bytes
# Text, a chat, or token ids.
Prompt = str | Sequence[int] | Sequence[Message]


class Sampling(TypedDict, total=False):
    """Sampling parameters of a request. Missing ones default to the model's generation config."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    banned_sequences: Sequence[Sequence[int]]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    prompt_logprobs: int
    structured_outputs: StructuredOutputs | Mapping[str, Any]  # a mapping of its fields
    extra_args: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class Generation:
    """Parameters of a request other than its prompt."""

    # SamplingParams set every parameter; Sampling leaves the others to the model's defaults.
    sampling: SamplingParams | Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    request_id: str = ""
    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    kv_hints: KvHints = NO_KV_HINTS
    kv_transfer_params: str = ""  # JSON, of a vLLM server that has computed the prompt's KV
    prediction: str = ""  # text that the answer is likely to repeat, which is then faster
    n: int = 1  # number of answers; answer i is sampled with the seed of the request plus i
    traceparent: str = ""  # of the caller's own W3C trace, which the request then joins

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TRACEPARENT, self.traceparent),) if self.traceparent else ()


DEFAULT_GENERATION = Generation()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of an answer and their text. The chunks of an answer come in order."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    finish: Finish | None = None  # set on the last chunk of each answer
    index: int = 0  # of the answer, from 0 to n - 1


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int
    vocab_size: int
    sampling_defaults: SamplingDefaults
    max_sequence_len: int  # max_model_len, or less if the KV caches of the nodes are smaller
    tasks: tuple[str, ...] = ()  # of generate, embed and classify


@dataclass(slots=True)
class Answer:
    """A complete answer, assembled from its chunks."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, chunk: Chunk) -> None:
        self.request_id = chunk.request_id
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs.extend(chunk.prompt_logprobs)
        self.finish = chunk.finish or self.finish


def new_answers(generation: Generation) -> list[Answer]:
    """Return `n` empty answers to assemble chunks in. Raises InvalidRequest."""
    if generation.n < 1:
        raise InvalidRequest(f"n is {generation.n}; it must be at least 1", "n")
    return [Answer() for _ in range(generation.n)]


def check_single(generation: Generation) -> None:
    """Raises InvalidRequest unless n is 1."""
    if len(new_answers(generation)) > 1:
        raise InvalidRequest(f"n is {generation.n}: use generate_all to get all the answers", "n")
