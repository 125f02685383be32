"""Clients' messages to the router's values and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.stops import StopRule
from baton.v1 import inference_pb2
from engine.errors import InvalidRequest
from engine.sampling import NO_ADVICE, SamplingDefaults
from router.values import (
    Call,
    ChatMessage,
    ChatPrompt,
    Ending,
    Piece,
    PrefillPlace,
    Prompt,
    Served,
    TextPrompt,
    Timings,
    TokenPrompt,
)
from serving.errors import EmptyPrompt
from serving.translate import FINISH_TO_MESSAGE, logprobs_to, prompt_logprobs_to, sampling_from

MOST_ANSWERS = 128  # to one request; each is a sequence of its own
NUM_SEEDS = 1 << 64
MOST_STOP_STRINGS = 64
MOST_STOP_CHARACTERS = 1024
MOST_BAD_WORDS = 64
MOST_BAD_CHARACTERS = 256
PLACE_TO_MESSAGE = {
    PrefillPlace.REMOTE: inference_pb2.PREFILL_PLACE_REMOTE,
    PrefillPlace.LOCAL: inference_pb2.PREFILL_PLACE_LOCAL,
}


def calls_from(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    defaults: SamplingDefaults = NO_ADVICE,
) -> list[Call]:
    """One for each answer. Raises what a bad request deserves."""
    num_answers = message.n if message.HasField("n") else 1
    if not 1 <= num_answers <= MOST_ANSWERS:
        raise InvalidRequest(f"n is {num_answers}; it must be from 1 to {MOST_ANSWERS}", "n")
    call = call_from(message, request_id, defaults)
    if num_answers == 1:
        return [call]
    return [
        replace(
            call,
            request_id=f"{request_id}-{index}",
            sampling=replace(call.sampling, seed=seed_of(call.sampling.seed, index)),
        )
        for index in range(num_answers)
    ]


def seed_of(seed: int | None, index: int) -> int | None:
    """Each answer to a prompt has its own, and the first has the one that was given."""
    return None if seed is None else (seed + index) % NUM_SEEDS


def call_from(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    defaults: SamplingDefaults = NO_ADVICE,
) -> Call:
    """Raises what a bad request deserves."""
    sampling = sampling_from(message.sampling, defaults)
    stop = StopRule(
        strings=stop_strings_from(message.sampling.stop),
        is_included=message.sampling.include_stop_in_output,
        min_tokens=sampling.min_tokens,
    )
    return Call(
        request_id=request_id,
        prompt=prompt_from(message),
        sampling=sampling,
        stop=stop,
        model=message.model,
        priority=message.priority,
        cache_salt=message.cache_salt,
        bad_words=bad_words_from(message.sampling.bad_words),
    )


def bad_words_from(given: Sequence[str]) -> tuple[str, ...]:
    """Each of their spellings is looked for before each token."""
    words = tuple(given)
    if len(words) > MOST_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} texts; at most {MOST_BAD_WORDS} may be", "bad_words"
        )
    for word in words:
        if not 0 < len(word) <= MOST_BAD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words has a text of {len(word)} characters; from 1 to {MOST_BAD_CHARACTERS} "
                "may be",
                "bad_words",
            )
    return words


def stop_strings_from(given: Sequence[str]) -> tuple[str, ...]:
    """All of them are looked for behind each token: neither many nor long ones are taken."""
    strings = tuple(string for string in given if string)
    if len(strings) > MOST_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(strings)} strings; at most {MOST_STOP_STRINGS} may be", "stop"
        )
    longest = max(map(len, strings), default=0)
    if longest > MOST_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {MOST_STOP_CHARACTERS} may be",
            "stop",
        )
    return strings


def prompt_from(message: inference_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
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
    return ChatPrompt(tuple(ChatMessage(one.role, one.content) for one in message.messages))


def response_to(
    request_id: str, part: Piece | Ending, index: int = 0
) -> inference_pb2.GenerateResponse:
    if isinstance(part, Ending):
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
        logprobs=[logprobs_to(one) for one in part.logprobs],
        prompt_logprobs=prompt_logprobs_to(part.prompt_logprobs),
    )


class Responses:
    """One answer's messages. Each is to be written before the next is asked for."""

    def __init__(self, request_id: str, index: int = 0) -> None:
        self._request_id = request_id
        self._index = index
        # Filled anew for every token: making a message costs more than filling it.
        self._plain = inference_pb2.GenerateResponse(request_id=request_id, index=index)

    def next(self, part: Piece | Ending) -> inference_pb2.GenerateResponse:
        if isinstance(part, Ending) or part.logprobs or part.prompt_logprobs:
            return response_to(self._request_id, part, self._index)
        self._plain.first_index = part.first_index
        self._plain.token_ids[:] = part.token_ids
        self._plain.text = part.text
        return self._plain


def _finish_to(ending: Ending) -> inference_pb2.Finish:
    finish = ending.finish
    return inference_pb2.Finish(
        reason=FINISH_TO_MESSAGE[finish.reason],
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        usage=inference_pb2.Usage(
            prompt_tokens=ending.num_prompt_tokens,
            completion_tokens=ending.num_completion_tokens,
            cached_prompt_tokens=ending.served.num_cached_prompt_tokens,
        ),
        timings=_timings_to(ending.timings),
        served=_served_to(ending.served),
    )


def _timings_to(timings: Timings) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        dispatched_s=timings.dispatched_s,
        first_token_s=timings.first_token_s or 0.0,
        first_decoded_token_s=timings.first_decoded_token_s or 0.0,
        finished_s=timings.finished_s,
    )


def _served_to(served: Served) -> inference_pb2.Served:
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
    )
