"""Hostile OpenAI requests: accepted or refused by name; accepted ones fit into messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import NamedError
from baton.core.ids import RequestId
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.router.doors.openai.request.bodies import ChatBody, CompletionBody
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    ParsedRequest,
    chat_completion_from,
    completion_from,
)
from baton.router.http.bodies import json_object
from baton.router.http.errors import status_of
from baton.router.values import TokenPrompt
from baton.rpc.messages.calls import leg_order

CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 512)
numbers = st.integers() | st.sampled_from(
    [-1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**400]
)
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text(max_size=5)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("user") | scalars,
        "content": scalars | st.lists(st.fixed_dictionaries({"type": st.just("text")})),
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"arguments": st.text()})})
        ),
    },
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def bodies(fields: dict[str, Any], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw bodies with arbitrary values in some fields, and sometimes valid ones."""
    some = st.dictionaries(st.sampled_from([*fields, "response_format", "x"]), values, max_size=4)
    return st.tuples(some, st.fixed_dictionaries({}, optional=fixed)).map(
        lambda pair: {**pair[0], **pair[1]}
    )


completions = bodies(
    CompletionBody.model_fields,
    prompt=st.text(max_size=3) | st.lists(numbers, max_size=3),
    logit_bias=st.dictionaries(st.text(max_size=3), scalars, max_size=2),
)
chats = bodies(ChatBody.model_fields, messages=st.lists(messages, max_size=2))

largest = 2**31 - 1
tidy = st.fixed_dictionaries(
    {"prompt": st.text() | st.lists(st.integers(0, largest), min_size=1)},
    optional={
        "max_tokens": st.integers(1, largest),
        "top_k": st.integers(-1, largest),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "priority": st.integers(-largest, largest),
        "cache_salt": st.text(st.characters(exclude_categories=["C", "Z"])),
        "logit_bias": st.dictionaries(st.integers(0, largest).map(str), st.floats(-100, 100)),
        "stop_token_ids": st.lists(st.integers(0, largest)),
        "allowed_token_ids": st.lists(st.integers(0, largest), min_size=1),
        "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False),
        "stop": st.text() | st.lists(st.text(), max_size=3),
        "kv_hints": st.fixed_dictionaries(
            {},
            optional={
                "session_id": st.text(st.characters(exclude_categories=["C", "Z"]), max_size=256),
                "retain_s": st.floats(0, 86400),
                "priority": st.integers(0, 100),
            },
        ),
    },
)


def check(requested: ParsedRequest) -> None:
    for call in requested.calls:
        prompt = call.prompt.token_ids if isinstance(call.prompt, TokenPrompt) else (1,)
        sampling, seed = call.sampling, call.sampling.seed or 0
        whole = EngineRequest(
            RequestId("id#1"),
            prompt,
            sampling,
            seed,
            priority=call.priority,
            cache_salt=call.cache_salt,
            kv_hints=call.kv_hints,
        )
        leg_order(LegKind.PREFILL, whole).SerializeToString()


def refusal_of(read: Callable[[], ParsedRequest]) -> Exception | None:
    """Return the refusal, or None if the request was accepted and fits. Bugs propagate."""
    try:
        check(read())
    except NamedError as refusal:
        return refusal
    return None


@given(completions)
def test_a_completion_is_accepted_or_refused_by_name(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()

    refusal = refusal_of(lambda: completion_from(json_object(body), "id", CONTEXT))

    assert refusal is None or status_of(refusal) == 400


@given(chats)
def test_a_chat_is_accepted_or_refused_by_name(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()

    refusal = refusal_of(lambda: chat_completion_from(json_object(body), "id", CONTEXT))

    assert refusal is None or status_of(refusal) == 400


@given(tidy)
def test_requests_within_the_limits_are_accepted_and_fit_into_messages(
    fields: dict[str, Any],
) -> None:
    check(completion_from(json_object(json.dumps(fields).encode()), "id", CONTEXT))
