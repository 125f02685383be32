"""Converts client messages to router values and back. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from google.protobuf import struct_pb2

from baton.core.errors import InvalidRequest
from baton.core.extra_args import MAX_ARGUMENT_ENTRIES
from baton.core.sampling import (
    MAX_BANNED_SEQUENCE_TOKENS,
    MAX_BANNED_SEQUENCES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    NO_SAMPLING_DEFAULTS,
    SamplingDefaults,
)
from baton.core.structured_outputs import MAX_CHOICES
from baton.router.input_processing.limits import (
    MAX_ANSWERS,
    MAX_CHAT_MESSAGES,
    MAX_EXTRA_ARGS,
    MAX_POSITIONS_PER_SLICE,
    check_count,
    check_hints,
    check_name,
    check_prompt_length,
    check_total_size,
)
from baton.router.values import (
    AnswerPart,
    ChatMessage,
    ChatPrompt,
    CompletionSummary,
    FinishStatus,
    GenerateCall,
    PrefillPlace,
    Prompt,
    ServedBy,
    TextPrompt,
    Timings,
    TokenChunk,
    TokenPrompt,
)
from baton.rpc.errors import EmptyPrompt
from baton.rpc.messages.conversion import (
    KV_HINTS,
    logprobs_to,
    prompt_logprobs_to,
    sampling_from,
)
from baton.rpc.messages.mapper import Mapper
from baton.text.stop_strings import StopRule
from baton.v1 import inference_pb2, sampling_pb2

NUM_SEEDS = 1 << 64
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_ENTRIES = 1024  # including empty ones, which are ignored
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_COUNTS = {
    "logit_bias": MAX_LOGIT_BIASES,
    "banned_token_ids": MAX_LISTED_TOKEN_IDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "banned_sequences": MAX_BANNED_SEQUENCES,
    "extra_args": MAX_EXTRA_ARGS,
}
PLACE_TO_MESSAGE = {
    PrefillPlace.REMOTE: inference_pb2.PREFILL_PLACE_REMOTE,
    PrefillPlace.LOCAL: inference_pb2.PREFILL_PLACE_LOCAL,
}


def calls_from(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS,
    max_model_len: int | None = None,
) -> list[GenerateCall]:
    """Convert a request to one `Call` for each of its `n` answers.

    Raises InvalidRequest and EmptyPrompt.
    """
    num_answers = message.n if message.HasField("n") else 1
    if not 1 <= num_answers <= MAX_ANSWERS:
        raise InvalidRequest(f"n is {num_answers}; it must be from 1 to {MAX_ANSWERS}", "n")
    call = call_from(message, request_id, defaults, max_model_len)
    check_total_size(call.sampling, call.bad_words, num_answers)
    check_hints(call.kv_hints, num_answers, call.sampling.prompt_logprobs)
    if num_answers == 1:
        return [call]
    return [
        replace(
            call,
            request_id=f"{request_id}-{index}",
            sampling=replace(call.sampling, seed=answer_seed(call.sampling.seed, index)),
        )
        for index in range(num_answers)
    ]


def answer_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of answer `index`. The first answer has the seed of the request."""
    return None if seed is None else (seed + index) % NUM_SEEDS


def call_from(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS,
    max_model_len: int | None = None,
) -> GenerateCall:
    """Convert a request to a `Call`, ignoring `n`. Raises InvalidRequest and EmptyPrompt."""
    check_name("model", message.model)
    check_name("cache_salt", message.cache_salt)
    params = message.sampling
    _check_counts(params)
    sampling = sampling_from(params, defaults)
    stop = StopRule(
        stop_strings_from(params.stop), params.include_stop_in_output, sampling.min_tokens
    )
    return GenerateCall(
        request_id=request_id,
        prompt=prompt_from(message, max_model_len),
        sampling=sampling,
        stop=stop,
        model=message.model,
        priority=message.priority,
        cache_salt=message.cache_salt,
        kv_hints=KV_HINTS.from_message(message.kv_hints),
        bad_words=bad_words_from(params.bad_words),
    )


def _check_counts(message: sampling_pb2.SamplingParams) -> None:
    """Check the sizes of lists and maps before they are copied. Raises InvalidRequest.

    `SamplingParams` checks the same limits again.
    """
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


def bad_words_from(texts: Sequence[str]) -> tuple[str, ...]:
    """Check `bad_words`. Raises InvalidRequest.

    Number and length are limited because every token is checked against each spelling.
    """
    if len(texts) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(texts)} texts; at most {MAX_BAD_WORDS} are allowed", "bad_words"
        )
    words = tuple(texts)
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words has a text of {len(word)} characters; from 1 to "
                f"{MAX_BAD_WORD_CHARACTERS} are allowed",
                "bad_words",
            )
    return words


def stop_strings_from(entries: Sequence[str]) -> tuple[str, ...]:
    """Check stop strings and drop the empty ones. Raises InvalidRequest.

    Number and length are limited because the text is searched for each of them after every token.
    """
    check_count("stop", len(entries), MAX_STOP_ENTRIES)
    strings = tuple(entry for entry in entries if entry)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
        )
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed",
            "stop",
        )
    return strings


def prompt_from(message: inference_pb2.GenerateRequest, max_model_len: int | None = None) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            check_prompt_length(len(message.token_ids.ids), max_model_len)
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            return chat_from(message.chat)
    raise EmptyPrompt("no prompt: set one of text, token_ids and chat")


def tokenize_input_from(message: inference_pb2.TokenizeRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return chat_from(message.chat)
    raise EmptyPrompt("nothing to tokenize: set one of text and chat")


def chat_from(message: inference_pb2.Chat) -> ChatPrompt:
    check_count("messages", len(message.messages), MAX_CHAT_MESSAGES)
    return ChatPrompt(tuple(ChatMessage(entry.role, entry.content) for entry in message.messages))


def response_to(
    request_id: str, part: AnswerPart, index: int = 0
) -> inference_pb2.GenerateResponse:
    if isinstance(part, CompletionSummary):
        return inference_pb2.GenerateResponse(
            request_id=request_id,
            index=index,
            first_index=part.num_completion_tokens,
            finish=_finish_to(part),
        )
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        index=index,
        first_index=part.first_index,
        token_ids=part.token_ids,
        text=part.text,
        logprobs=[logprobs_to(entry) for entry in part.logprobs],
        prompt_logprobs=prompt_logprobs_to(part.prompt_logprobs),
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
        if isinstance(part, CompletionSummary) or part.logprobs or part.prompt_logprobs:
            return response_to(self._request_id, part, self._index)
        self._reused.first_index = part.first_index
        self._reused.token_ids[:] = part.token_ids
        self._reused.text = part.text
        return self._reused

    async def build_in_slices(self, part: TokenChunk) -> inference_pb2.GenerateResponse:
        """Build the message of a piece with many prompt logprobs.

        It is filled in slices, between which the event loop runs other requests.
        """
        response = response_to(self._request_id, part._replace(prompt_logprobs=()), self._index)
        for first in range(0, len(part.prompt_logprobs), MAX_POSITIONS_PER_SLICE):
            entries = part.prompt_logprobs[first : first + MAX_POSITIONS_PER_SLICE]
            response.prompt_logprobs.extend(prompt_logprobs_to(entries))
            await asyncio.sleep(0)
        return response


FINISH = Mapper(
    FinishStatus, inference_pb2.Finish, unmapped=("usage", "timings", "served", "warnings")
)
TIMINGS = Mapper(Timings, inference_pb2.Timings)


def _finish_to(summary: CompletionSummary) -> inference_pb2.Finish:
    return FINISH.to_message(
        summary.finish,
        usage=inference_pb2.Usage(
            prompt_tokens=summary.num_prompt_tokens,
            completion_tokens=summary.num_completion_tokens,
            cached_prompt_tokens=summary.served.num_cached_prompt_tokens,
        ),
        timings=TIMINGS.to_message(summary.timings),
        served=_served_to(summary.served),
        warnings=summary.warnings,
    )


def _served_to(served: ServedBy) -> inference_pb2.Served:
    summary = served.summary
    return inference_pb2.Served(
        prefill_node=served.prefill_node,
        decode_node=served.decode_node,
        prefill=PLACE_TO_MESSAGE[served.prefill],
        prefill_reason=served.prefill_reason,
        kv_bytes=summary.kv_bytes,
        kv_blocks=summary.kv_blocks,
        kv_transport=summary.kv_transport,
        prompt_tokens_computed_on_decode=summary.prompt_tokens_computed,
        prompt_tokens_cached_on_decode=summary.prompt_tokens_cached,
        attempts=served.attempts,
        trace_id=served.trace_id,
        tokens_proposed=summary.tokens_proposed,
        tokens_accepted=summary.tokens_accepted,
        prompt_tokens_cached_on_prefill=served.num_cached_on_prefill,
        kv_conversion=summary.kv_conversion,
        prompt_tokens_loaded=served.prompt_tokens_loaded,
    )
