"""Limits on the size of requests, over gRPC and HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import HandoffId
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import (
    MAX_BANNED_SEQUENCE_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    NO_SAMPLING_DEFAULTS,
    SamplingParams,
)
from baton.router.doors.grpc.translate import calls_from, check_request
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    chat_completion_from,
    completion_from,
)
from baton.router.input_processing.limits import MAX_CHAT_MESSAGES, MAX_NAME_CHARACTERS, MAX_TOOLS
from baton.rpc.messages.calls import engine_request, leg_order, node_request_id
from baton.v1 import inference_pb2, sampling_pb2
from tests.support.fake_vllm_api import PARAMS

LONG = "x" * (MAX_NAME_CHARACTERS + 1)
CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 100)
TURN = {"role": "user", "content": "a"}


def over_grpc(**fields: Any) -> None:
    sampling = sampling_pb2.SamplingParams(**fields.pop("sampling", {}))
    prompt: dict[str, Any] = {} if {"chat", "token_ids"} & fields.keys() else {"text": "a"}
    message = inference_pb2.GenerateRequest(**prompt, **fields, sampling=sampling)
    check_request(message, max_model_len=100)
    calls_from(message, "id")


def completion(**fields: Any) -> None:
    completion_from({"prompt": "a", **fields}, "id", CONTEXT)


def chat(**fields: Any) -> None:
    chat_completion_from({"messages": [TURN], **fields}, "id", CONTEXT)


def ids(count: int) -> dict[str, Any]:
    return {"ids": [5] * count}


REFUSED: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (over_grpc, {"cache_salt": LONG}, "cache_salt"),
    (over_grpc, {"cache_salt": "a\nb"}, "cache_salt"),
    (over_grpc, {"model": LONG}, "model"),
    (over_grpc, {"token_ids": ids(101)}, "prompt"),
    (over_grpc, {"sampling": {"stop": [""] * 1025}}, "stop"),
    (over_grpc, {"sampling": {"stop_token_ids": [5] * 1025}}, "stop_token_ids"),
    (over_grpc, {"sampling": {"logit_bias": dict.fromkeys(range(16385), 1.0)}}, "logit_bias"),
    (over_grpc, {"sampling": {"allowed_token_ids": ids((1 << 18) + 1)}}, "allowed_token_ids"),
    (over_grpc, {"sampling": {"banned_sequences": [ids(1 << 16), ids(1)]}}, "banned_sequences"),
    (over_grpc, {"sampling": {"banned_sequences": [ids(1)] * 1025}}, "banned_sequences"),
    (over_grpc, {"n": 128, "sampling": {"banned_token_ids": [5] * 2049}}, "n"),
    (
        over_grpc,
        {"chat": {"messages": [inference_pb2.ChatMessage()] * (MAX_CHAT_MESSAGES + 1)}},
        "messages",
    ),
    (over_grpc, {"kv_hints": {"session_id": LONG}}, "kv_hints.session_id"),
    (over_grpc, {"kv_hints": {"session_id": "a\nb"}}, "kv_hints.session_id"),
    (over_grpc, {"kv_hints": {"retain_s": 86401}}, "kv_hints.retain_s"),
    (over_grpc, {"kv_hints": {"retain_s": math.nan}}, "kv_hints.retain_s"),
    (over_grpc, {"kv_hints": {"priority": 101}}, "kv_hints.priority"),
    (over_grpc, {"kv_hints": {"prefetch": True}, "n": 2}, "kv_hints.prefetch"),
    (over_grpc, {"kv_hints": {"release": True, "retain_s": 1}}, "kv_hints.release"),
    (completion, {"kv_hints": {"session_id": LONG}}, "kv_hints.session_id"),
    (completion, {"kv_hints": {"retain_s": -1}}, "kv_hints.retain_s"),
    (completion, {"kv_hints": {"priority": -1}}, "kv_hints.priority"),
    (completion, {"kv_hints": {"ttl": 1}}, "kv_hints.ttl"),
    (completion, {"kv_hints": {"release": 1}}, "kv_hints.release"),
    (completion, {"kv_hints": []}, "kv_hints"),
    (completion, {"kv_hints": {"prefetch": True}, "prompt": ["a", "b"]}, "kv_hints.prefetch"),
    (completion, {"kv_hints": {"prefetch": True}, "prompt_logprobs": 1}, "kv_hints.prefetch"),
    (
        completion,
        {"kv_hints": {"prefetch": True}, "kv_transfer_params": PARAMS},
        "kv_hints.prefetch",
    ),
    (chat, {"kv_hints": {"release": True, "prefetch": True}}, "kv_hints.release"),
    (completion, {"cache_salt": LONG}, "cache_salt"),
    (completion, {"cache_salt": "a\r"}, "cache_salt"),
    (completion, {"cache_salt": "\ud800"}, "cache_salt"),
    (completion, {"model": LONG}, "model"),
    (completion, {"prompt": [5] * 101}, "prompt"),
    (completion, {"prompt": [[5], [5] * 101]}, "prompt"),
    (completion, {"prompt": [[5]] * 129}, "prompt"),
    (completion, {"stop": [""] * 1025}, "stop"),
    (completion, {"stop_token_ids": [5] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
    (completion, {"stop_token_ids": ["a"] * 1000}, "stop_token_ids.0"),
    (completion, {"allowed_token_ids": [5] * ((1 << 18) + 1)}, "allowed_token_ids"),
    (completion, {"allowed_token_ids": [5] * 2049, "n": 128}, "n"),
    (completion, {"bad_words": ["x" * 256] * 64, "n": 128}, "n"),
    (completion, {"logit_bias": {str(one): 0 for one in range(16385)}}, "logit_bias"),
    (completion, {"vllm_xargs": {str(one): 0 for one in range(65)}}, "vllm_xargs"),
    (completion, {"vllm_xargs": {"a": [1] * 4097}}, "extra_args"),
    (completion, {"vllm_xargs": {"a\n": 1}}, "vllm_xargs"),
    (completion, {"vllm_xargs": {str(one): [1] * 4096 for one in range(9)}}, "n"),
    (completion, {"logit_bias": dict.fromkeys(map(str, range(513)), 1), "n": 128}, "n"),
    (completion, {"logprobs": 16, "n": 128, "stream": True}, "logprobs"),
    (over_grpc, {"n": 128, "sampling": {"logprobs": 16}}, "logprobs"),
    (chat, {"messages": [TURN] * (MAX_CHAT_MESSAGES + 1)}, "messages"),
    (chat, {"tools": [{}] * (MAX_TOOLS + 1)}, "tools"),
    (
        chat,
        {"stream": True, "stream_options": {str(one): 0 for one in range(1 << 15)}},
        "stream_options",
    ),
]


@pytest.mark.parametrize(("parse", "fields", "field"), REFUSED)
def test_values_beyond_the_limits_are_refused_with_the_field_name(
    parse: Callable[..., None], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)

    assert (refused.value.field or "").startswith(field)


def test_values_at_the_limits_are_accepted() -> None:
    over_grpc(
        cache_salt="é" * MAX_NAME_CHARACTERS,
        kv_hints={"session_id": "é" * MAX_NAME_CHARACTERS, "retain_s": 86400, "priority": 100},
        token_ids=ids(99),
        sampling={
            "logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0),
            "stop_token_ids": [5] * MAX_STOP_TOKEN_IDS,
            "banned_sequences": [ids(MAX_BANNED_SEQUENCE_TOKENS)],
        },
    )
    completion(prompt=[[5] * 100] * 128, stop_token_ids=[5] * 1024, logit_bias={"5": 1})
    chat(messages=[TURN] * MAX_CHAT_MESSAGES, tools=[{}] * MAX_TOOLS, cache_salt="a b")


@pytest.mark.parametrize(("name", "salt"), [("x" * 513, ""), ("a", "x" * 513)])
def test_nodes_refuse_names_that_no_router_sends(name: str, salt: str) -> None:
    request_id = node_request_id(HandoffId(name, 1))
    order = leg_order(
        LegKind.DECODE, EngineRequest(request_id, (1,), SamplingParams(), 0, cache_salt=salt)
    )

    with pytest.raises(InvalidRequest, match="513 characters"):
        engine_request(order, 0.0)
