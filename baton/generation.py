"""Requests and responses of the client as values, and their conversion to and from messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from baton.encoding import reject_invalid_text
from baton.v1 import inference_pb2, sampling_pb2
from engine.extra_args import parse_argument
from engine.sampling import Argument, SamplingDefaults, SamplingParams
from engine.structured_output.params import StructuredOutputs, parse_structured_outputs
from errors import InvalidRequest
from kv_transfer.types import TokenLogprobs
from rpc.messages.conversion import (
    argument_to,
    logprobs_from,
    prompt_logprobs_from,
    sampling_defaults_from,
    sampling_to,
    structured_outputs_to,
)
from telemetry.names import TRACEPARENT

Message = Mapping[str, str]  # role and content
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
    n: int = 1  # number of answers; answer i is sampled with the seed of the request plus i
    traceparent: str = ""  # of the caller's own W3C trace, which the request then joins

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TRACEPARENT, self.traceparent),) if self.traceparent else ()


DEFAULT_GENERATION = Generation()


@dataclass(frozen=True, slots=True)
class Served:
    """Nodes that served a request, and the KV transferred between them."""

    prefill_node: str
    decode_node: str
    is_prefill_remote: bool
    prefill_reason: str
    kv_bytes: int
    kv_blocks: int
    kv_transport: str
    prompt_tokens_computed_on_decode: int
    prompt_tokens_cached_on_decode: int
    attempts: int
    trace_id: str = ""  # empty: not traced
    tokens_proposed: int = 0  # by speculative decoding on the decode node
    tokens_accepted: int = 0  # of tokens_proposed
    # None without a prefill node, or if its count did not arrive before the last token.
    prompt_tokens_cached_on_prefill: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # stop or length
    stop_token_id: int | None
    stop_string: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    dispatched_s: float
    first_token_s: float
    first_decoded_token_s: float
    finished_s: float
    served: Served
    # Prompt tokens read from the prefix cache of the node that computed the others.
    num_cached_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of an answer and their text. The chunks of an answer come in order."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    finish: Finish | None  # set on the last chunk of each answer
    index: int = 0  # of the answer, from 0 to n - 1


@dataclass(frozen=True, slots=True)
class Model:
    """The served model and its limits."""

    name: str
    max_model_len: int
    vocab_size: int
    sampling_defaults: SamplingDefaults
    max_sequence_len: int  # max_model_len, or less if the KV caches of the nodes are smaller


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


def single_answer(answers: Sequence[Answer]) -> Answer:
    """Return the answer of a request with n = 1. Raises InvalidRequest for a larger n."""
    if len(answers) > 1:
        raise InvalidRequest(f"n is {len(answers)}: use generate_all to get all the answers", "n")
    return answers[0]


def request_from(prompt: Prompt, generation: Generation) -> inference_pb2.GenerateRequest:
    sampling = _sampling_to(generation.sampling)
    sampling.stop.extend(generation.stop)
    sampling.include_stop_in_output = generation.include_stop_in_output
    sampling.bad_words.extend(generation.bad_words)
    request = inference_pb2.GenerateRequest(
        request_id=generation.request_id,
        model=generation.model,
        sampling=sampling,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        n=generation.n if generation.n != 1 else None,
    )
    with reject_invalid_text():
        _set_prompt(request, prompt)
    return request


def _sampling_to(sampling: SamplingParams | Sampling) -> sampling_pb2.SamplingParams:
    """Raises InvalidRequest."""
    if isinstance(sampling, SamplingParams):
        return sampling_to(sampling)
    fields: dict[str, Any] = dict(sampling)
    if "allowed_token_ids" in fields:
        ids = fields["allowed_token_ids"]
        fields["allowed_token_ids"] = sampling_pb2.TokenIds(ids=ids)
    banned = fields.get("banned_sequences", ())
    fields["banned_sequences"] = [sampling_pb2.TokenIds(ids=sequence) for sequence in banned]
    extra = fields.get("extra_args", {})
    fields["extra_args"] = {name: argument_to(parse_argument(extra[name])) for name in extra}
    structured_outputs = fields.get("structured_outputs")
    if isinstance(structured_outputs, Mapping):
        structured_outputs = parse_structured_outputs(structured_outputs)
    fields["structured_outputs"] = structured_outputs_to(structured_outputs)
    try:
        return sampling_pb2.SamplingParams(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling {dict(sampling)!r} is invalid: {error}") from error


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if messages:
        request.chat.CopyFrom(_chat(messages))
        return
    token_ids = [item for item in prompt if isinstance(item, int)]
    request.token_ids.CopyFrom(sampling_pb2.TokenIds(ids=token_ids))


def tokenize_request_from(prompt: str | Sequence[Message]) -> inference_pb2.TokenizeRequest:
    with reject_invalid_text():
        if isinstance(prompt, str):
            return inference_pb2.TokenizeRequest(text=prompt)
        return inference_pb2.TokenizeRequest(chat=_chat(prompt))


def _chat(messages: Sequence[Message]) -> inference_pb2.Chat:
    return inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(**message) for message in messages]
    )


def model_from(response: inference_pb2.GetModelResponse) -> Model:
    return Model(
        name=response.model,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        sampling_defaults=sampling_defaults_from(response.sampling_defaults),
        max_sequence_len=response.max_sequence_len or response.max_model_len,
    )


def chunk_from(response: inference_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        request_id=response.request_id,
        first_index=response.first_index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(logprobs_from(token) for token in response.logprobs),
        prompt_logprobs=prompt_logprobs_from(response.prompt_logprobs),
        finish=_finish(response.finish) if response.HasField("finish") else None,
        index=response.index,
    )


def _finish(message: inference_pb2.Finish) -> Finish:
    reason = sampling_pb2.FinishReason.Name(message.reason)
    timings = message.timings
    return Finish(
        reason=reason.removeprefix("FINISH_REASON_").lower(),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        num_prompt_tokens=message.usage.prompt_tokens,
        num_completion_tokens=message.usage.completion_tokens,
        dispatched_s=timings.dispatched_s,
        first_token_s=timings.first_token_s,
        first_decoded_token_s=timings.first_decoded_token_s,
        finished_s=timings.finished_s,
        served=_parse_served(message.served),
        num_cached_prompt_tokens=(
            message.usage.cached_prompt_tokens
            if message.usage.HasField("cached_prompt_tokens")
            else None
        ),
    )


def _parse_served(message: inference_pb2.Served) -> Served:
    return Served(
        prefill_node=message.prefill_node,
        decode_node=message.decode_node,
        is_prefill_remote=message.prefill == inference_pb2.PREFILL_PLACE_REMOTE,
        prefill_reason=message.prefill_reason,
        kv_bytes=message.kv_bytes,
        kv_blocks=message.kv_blocks,
        kv_transport=message.kv_transport,
        prompt_tokens_computed_on_decode=message.prompt_tokens_computed_on_decode,
        prompt_tokens_cached_on_decode=message.prompt_tokens_cached_on_decode,
        attempts=message.attempts,
        trace_id=message.trace_id,
        tokens_proposed=message.tokens_proposed,
        tokens_accepted=message.tokens_accepted,
        prompt_tokens_cached_on_prefill=(
            message.prompt_tokens_cached_on_prefill
            if message.HasField("prompt_tokens_cached_on_prefill")
            else None
        ),
    )
