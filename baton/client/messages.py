"""Conversion of the client's requests and responses to and from messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.client.generation import Chunk, Generation, Message, Model, Prompt, Sampling
from baton.core.errors import InvalidRequest
from baton.core.extra_args import parse_argument
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import parse_structured_outputs
from baton.core.vectors import Floats, decode_vector
from baton.encoding import reject_invalid_text
from baton.rpc.messages.conversion import (
    LOGPROBS,
    PROMPT_LOGPROBS,
    SAMPLING,
    SAMPLING_DEFAULTS,
    STRUCTURED_OUTPUTS,
    argument_to,
    finish_from,
)
from baton.rpc.messages.mapper import Converter, Mapper
from baton.v1 import inference_pb2, sampling_pb2

REQUEST = Mapper(
    Generation,
    inference_pb2.GenerateRequest,
    unmapped=(
        *("sampling", "stop", "include_stop_in_output", "bad_words"),  # one message
        *("n", "traceparent", "text", "token_ids", "chat"),
    ),
)


def request_from(prompt: Prompt, generation: Generation) -> inference_pb2.GenerateRequest:
    sampling = _sampling_to(generation.sampling)
    sampling.stop.extend(generation.stop)
    sampling.include_stop_in_output = generation.include_stop_in_output
    sampling.bad_words.extend(generation.bad_words)
    n = generation.n if generation.n != 1 else None
    request = REQUEST.to_message(generation, sampling=sampling, n=n)
    with reject_invalid_text():
        _set_prompt(request, prompt)
    return request


def _sampling_to(sampling: SamplingParams | Sampling) -> sampling_pb2.SamplingParams:
    """Raises InvalidRequest."""
    if isinstance(sampling, SamplingParams):
        return SAMPLING.to_message(sampling)
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
    if structured_outputs is not None:
        fields["structured_outputs"] = STRUCTURED_OUTPUTS.to_message(structured_outputs)
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


def tokenize_request_from(
    prompt: str | Sequence[Message], model: str
) -> inference_pb2.TokenizeRequest:
    with reject_invalid_text():
        if isinstance(prompt, str):
            return inference_pb2.TokenizeRequest(text=prompt, model=model)
        return inference_pb2.TokenizeRequest(chat=_chat(prompt), model=model)


def embed_request_from(
    texts: Sequence[str | Sequence[int]],
    model: str,
    dimensions: int | None,
    truncate_prompt_tokens: int | None,
    cache_salt: str,
    *,
    per_token: bool = False,
) -> inference_pb2.EmbedRequest:
    with reject_invalid_text():
        inputs = [
            inference_pb2.EmbedInput(text=text)
            if isinstance(text, str)
            else inference_pb2.EmbedInput(token_ids=sampling_pb2.TokenIds(ids=text))
            for text in texts
        ]
    return inference_pb2.EmbedRequest(
        model=model,
        inputs=inputs,
        dimensions=dimensions,
        truncate_prompt_tokens=truncate_prompt_tokens,
        cache_salt=cache_salt,
        per_token=per_token,
    )


def embeddings_from(response: inference_pb2.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in response.embeddings]


def token_vectors_from(response: inference_pb2.EmbedResponse) -> list[Floats]:
    return [
        decode_vector(each.token_vectors).reshape(each.prompt_tokens, -1)
        for each in response.embeddings
    ]


def _chat(messages: Sequence[Message]) -> inference_pb2.Chat:
    return inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(**message) for message in messages]
    )


def model_from(response: inference_pb2.GetModelResponse) -> Model:
    return Model(
        name=response.model,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        sampling_defaults=SAMPLING_DEFAULTS.from_message(response.sampling_defaults),
        max_sequence_len=response.max_sequence_len or response.max_model_len,
        tasks=tuple(response.tasks),
    )


CHUNK = Mapper(
    Chunk,
    inference_pb2.GenerateResponse,
    converters={
        "logprobs": LOGPROBS,
        "prompt_logprobs": PROMPT_LOGPROBS,
        "finish": Converter(from_message=finish_from),
    },
)
