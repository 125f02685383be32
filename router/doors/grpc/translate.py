"""Checks client messages, converts them to router values, and these to responses. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from google.protobuf import struct_pb2

from baton.core.errors import InvalidRequest
from baton.core.extra_args import MAX_ARGUMENT_ENTRIES
from baton.core.foreign_kv import foreign_kv_from_json
from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.output import Finish
from baton.core.request import EMBED, TOKEN_EMBED, task_of
from baton.core.sampling import (
    MAX_BANNED_SEQUENCE_TOKENS,
    MAX_BANNED_SEQUENCES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    NO_SAMPLING_DEFAULTS,
    SamplingDefaults,
)
from baton.core.stop_strings import StopRule
from baton.core.structured_outputs import MAX_CHOICES
from baton.core.vectors import shorten
from baton.router.answers import MAX_INPUTS, calls_for_answers, calls_for_texts
from baton.router.embeddings import EmbeddedText
from baton.router.input_processing.limits import (
    MAX_ANSWERS,
    MAX_CHAT_MESSAGES,
    MAX_EXTRA_ARGS,
    MAX_POSITIONS_PER_SLICE,
    check_count,
    check_name,
    check_prompt_length,
    check_texts,
)
from baton.router.parts import content_of
from baton.router.pictures.plan import ImageFile
from baton.router.values import (
    AnswerPart,
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    Prompt,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from baton.rpc.errors import EmptyPrompt
from baton.rpc.messages.conversion import (
    KV_HINTS,
    LOGPROBS,
    PROMPT_LOGPROBS,
    finish_to,
    prompt_logprobs_to,
    sampling_from,
)
from baton.rpc.messages.mapper import Mapper
from baton.v1 import inference_pb2, sampling_pb2


def calls_from(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS,
    model: ModelVariant = ANY_MODEL,
) -> list[GenerateCall]:
    """Convert a checked request to one call for each of its `n` answers.

    Raises InvalidRequest and EmptyPrompt.
    """
    params = message.sampling
    sampling = sampling_from(params, defaults)
    stop = StopRule(
        tuple(filter(None, params.stop)), params.include_stop_in_output, sampling.min_tokens
    )
    hints, params_of_kv = KV_HINTS.from_message(message.kv_hints), message.kv_transfer_params
    call = GenerateCall(
        request_id=request_id,
        prompt=prompt_from(message),
        sampling=sampling,
        task=task_of(hints),
        stop=stop,
        model=model,
        priority=message.priority,
        cache_salt=message.cache_salt,
        kv_hints=hints,
        prediction=message.prediction,
        bad_words=tuple(params.bad_words),
        foreign_kv=foreign_kv_from_json(params_of_kv) if params_of_kv else None,
    )
    return calls_for_answers(call, [call.prompt], message.n if message.HasField("n") else 1)


def prompt_from(message: inference_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            return chat_from(message.chat)
    raise EmptyPrompt("no prompt: set one of text, token_ids and chat")


def embed_calls_from(
    message: inference_pb2.EmbedRequest, request_id: str, model: ModelVariant = ANY_MODEL
) -> list[GenerateCall]:
    """Convert a request to one call for each of its texts. Raises InvalidRequest, EmptyPrompt."""
    check_name("request_id", message.request_id)
    check_count("inputs", len(message.inputs), MAX_INPUTS)
    is_cut = message.HasField("truncate_prompt_tokens")
    return calls_for_texts(
        request_id,
        [_embed_input_from(each) for each in message.inputs],
        model,
        max_tokens=message.truncate_prompt_tokens if is_cut else None,
        priority=message.priority,
        cache_salt=message.cache_salt,
        task=TOKEN_EMBED if message.per_token else EMBED,
    )


def _embed_input_from(message: inference_pb2.EmbedInput) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
    raise EmptyPrompt("an input is empty: set one of text and token_ids")


def embedding_to(text: EmbeddedText, num_dimensions: int | None) -> inference_pb2.Embedding:
    vector = shorten(text.vector, num_dimensions)
    message = inference_pb2.Embedding(prompt_tokens=text.num_tokens)
    if vector.ndim == 2:
        message.token_vectors = vector.astype("<f4").tobytes()
    else:
        message.values.extend(vector.tolist())
    return message


def tokenize_input_from(message: inference_pb2.TokenizeRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return chat_from(message.chat)
    raise EmptyPrompt("nothing to tokenize: set one of text and chat")


def chat_from(message: inference_pb2.Chat) -> ChatPrompt:
    messages = enumerate(message.messages)
    return ChatPrompt(tuple(_message_from(entry, index) for index, entry in messages))


def _message_from(message: inference_pb2.ChatMessage, index: int) -> ChatMessage:
    where = f"chat.messages.{index}.images"
    images = [ImageFile(data, f"{where}.{number}") for number, data in enumerate(message.images)]
    return ChatMessage(message.role, content_of((*images, message.content)))


CHUNK = Mapper(
    TokenChunk,
    inference_pb2.GenerateResponse,
    converters={"logprobs": LOGPROBS, "prompt_logprobs": PROMPT_LOGPROBS},
    unmapped=("request_id", "index", "finish", "vector", "prompt_end"),
)


class ResponseBuilder:
    """Builds the response messages of one answer.

    A message is reused for the next part, so write each one before requesting the next.
    """

    def __init__(self, request_id: str, index: int = 0) -> None:
        self._request_id = request_id
        self._index = index
        # Reused for every token: creating a message costs more than filling it.
        self._reused = inference_pb2.GenerateResponse(request_id=request_id, index=index)

    def next(self, part: AnswerPart) -> inference_pb2.GenerateResponse:
        if isinstance(part, Finish):
            return inference_pb2.GenerateResponse(
                request_id=self._request_id,
                index=self._index,
                first_index=part.num_completion_tokens,
                finish=finish_to(part),
            )
        if part.logprobs or part.prompt_logprobs:
            return self._new(part)
        self._reused.first_index = part.first_index
        self._reused.token_ids[:] = part.token_ids
        self._reused.text = part.text
        return self._reused

    async def build_in_slices(self, part: TokenChunk) -> inference_pb2.GenerateResponse:
        """Build the message of a chunk with many prompt logprobs.

        It is filled in slices, between which the event loop runs other requests.
        """
        response = self._new(part._replace(prompt_logprobs=()))
        for first in range(0, len(part.prompt_logprobs), MAX_POSITIONS_PER_SLICE):
            entries = part.prompt_logprobs[first : first + MAX_POSITIONS_PER_SLICE]
            response.prompt_logprobs.extend(prompt_logprobs_to(entries))
            await asyncio.sleep(0)
        return response

    def _new(self, part: TokenChunk) -> inference_pb2.GenerateResponse:
        return CHUNK.to_message(part, request_id=self._request_id, index=self._index)


MAX_COUNTS = {
    "logit_bias": MAX_LOGIT_BIASES,
    "banned_token_ids": MAX_LISTED_TOKEN_IDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "banned_sequences": MAX_BANNED_SEQUENCES,
    "extra_args": MAX_EXTRA_ARGS,
}


def check_request(message: inference_pb2.GenerateRequest, max_model_len: int | None) -> None:
    """Check a request before it is translated, so that nothing large is copied first.

    Values check their own fields when they are built, and the `InputProcessor` what depends on the
    prompt's tokens. `max_model_len` is None while unknown. Raises InvalidRequest and
    ContextLengthExceeded.
    """
    check_name("request_id", message.request_id)
    if message.HasField("n") and not 1 <= message.n <= MAX_ANSWERS:
        raise InvalidRequest(f"n is {message.n}; it must be from 1 to {MAX_ANSWERS}", "n")
    params = message.sampling
    check_texts(message.model, message.cache_salt, params.stop, params.bad_words)
    _check_sampling(params)
    check_prompt_length(len(message.token_ids.ids), max_model_len)
    check_chat(message.chat)


def check_chat(message: inference_pb2.Chat) -> None:
    check_count("messages", len(message.messages), MAX_CHAT_MESSAGES)


def _check_sampling(message: sampling_pb2.SamplingParams) -> None:
    """Check the sizes of lists and maps. `SamplingParams` checks the same limits again."""
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in MAX_COUNTS:
            check_count(name, len(value), MAX_COUNTS[name])
        if name == "allowed_token_ids":
            check_count(name, len(value.ids), MAX_LISTED_TOKEN_IDS)
        elif name == "banned_sequences":
            num_banned = sum(len(sequence.ids) for sequence in value)
            check_count(name, num_banned, MAX_BANNED_SEQUENCE_TOKENS)
        elif name == "structured_outputs":
            check_count(name, len(value.choice.texts), MAX_CHOICES)
        elif name == "extra_args":
            _check_arguments(value)


def _check_arguments(arguments: Mapping[str, struct_pb2.Value]) -> None:
    for name, value in arguments.items():
        check_name("extra_args", name)
        check_count("extra_args", len(value.list_value.values), MAX_ARGUMENT_ENTRIES)
