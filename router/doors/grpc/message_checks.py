"""Checks of a gRPC request before it is translated, so that nothing large is copied first. Pure.

Values check their own fields when they are built. What depends on the prompt's tokens is checked
after tokenization, by the `InputProcessor`.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf import struct_pb2

from baton.core.errors import InvalidRequest
from baton.core.extra_args import MAX_ARGUMENT_ENTRIES
from baton.core.sampling import (
    MAX_BANNED_SEQUENCE_TOKENS,
    MAX_BANNED_SEQUENCES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
)
from baton.core.structured_outputs import MAX_CHOICES
from baton.router.input_processing.limits import (
    MAX_ANSWERS,
    MAX_CHAT_MESSAGES,
    MAX_EXTRA_ARGS,
    check_count,
    check_name,
    check_prompt_length,
    check_texts,
)
from baton.v1 import inference_pb2, sampling_pb2

MAX_COUNTS = {
    "logit_bias": MAX_LOGIT_BIASES,
    "banned_token_ids": MAX_LISTED_TOKEN_IDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "banned_sequences": MAX_BANNED_SEQUENCES,
    "extra_args": MAX_EXTRA_ARGS,
}


def check_request(message: inference_pb2.GenerateRequest, max_model_len: int | None) -> None:
    """Raises InvalidRequest and ContextLengthExceeded. `max_model_len` is None while unknown."""
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
