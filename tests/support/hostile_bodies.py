"""Strategies for hostile bodies of the Messages and the Responses API."""

from __future__ import annotations

from hypothesis import strategies as st

from baton.router.doors.messages import bodies as messages_bodies
from baton.router.doors.responses import bodies as responses_bodies

_numbers = st.integers() | st.sampled_from([-1, 0, 1, 2**31 - 1, 2**31, 2**63, 10**400])
_scalars = st.none() | st.booleans() | _numbers | st.floats(allow_nan=False) | st.text(max_size=5)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
_caches = st.fixed_dictionaries({"type": st.just("ephemeral")}, optional={"ttl": _scalars})
_data = st.sampled_from(["aGk=", "a", "data:text/plain,hi", "data:;base64,AA==", "http://x"])
_sources = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "base64", "content", "url", "file"]) | _scalars},
    optional={
        "media_type": st.sampled_from(["text/plain", "application/pdf", "image/png"]),
        "data": _data | _scalars,
        "content": st.text(max_size=3) | st.lists(_values, max_size=2),
    },
)
_kinds = ["text", "thinking", "tool_use", "tool_result", "document", "image", "redacted_thinking"]
_blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(_kinds)},
    optional={
        "source": _sources | _scalars,
        "title": st.text(max_size=3) | _scalars,
        "citations": st.fixed_dictionaries({"enabled": st.booleans()}) | _scalars,
        "text": st.text(max_size=3) | _scalars,
        "thinking": st.text(max_size=3),
        "id": st.text(max_size=3),
        "name": st.text(max_size=3) | _scalars,
        "input": st.dictionaries(st.text(max_size=3), _values, max_size=2) | _scalars,
        "tool_use_id": st.text(max_size=3) | _scalars,
        "content": st.text(max_size=3) | st.lists(_values, max_size=2) | _scalars,
        "cache_control": _caches | _scalars,
    },
)
_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"])},
    optional={"content": st.text(max_size=3) | st.lists(_blocks | _values, max_size=3) | _scalars},
)
_tools = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=3),
        "input_schema": st.dictionaries(st.text(max_size=4), _values, max_size=2) | _scalars,
        "type": st.just("custom") | _scalars,
        "strict": st.booleans() | _scalars,
    },
)
_MESSAGES_FIELDS = [
    *messages_bodies.MessagesBody.model_fields,
    *messages_bodies.CHAT_FIELDS,
    *messages_bodies.IGNORED_FIELDS,
    "context_management",
    "x",
]
_USER = {"role": "user", "content": "hi"}
_USE = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
_valid_messages = st.sampled_from(
    [
        [_USER],
        [_USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]}, _USER],
        [
            {"role": "assistant", "content": [_USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
        ],
    ]
)
_SEE = {"name": "see", "input_schema": {"type": "object"}}
# Half of the fields are valid, so that some requests are.
messages_requests = st.tuples(
    st.just({}) | st.dictionaries(st.sampled_from(_MESSAGES_FIELDS), _values, max_size=2),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 99),
            "messages": _valid_messages | st.lists(_messages, max_size=3),
        },
        optional={
            "system": st.text(max_size=3) | st.lists(_blocks, max_size=2),
            "tools": st.just([_SEE]) | st.lists(_tools, max_size=2),
            "tool_choice": st.fixed_dictionaries(
                {"type": st.sampled_from(["auto", "any", "tool", "none"])},
                optional={"name": st.text(max_size=3)},
            ),
            "thinking": st.fixed_dictionaries({"type": st.just("enabled")}),
            "stop_sequences": st.lists(st.text(max_size=3), max_size=3),
        },
    ),
).map(lambda pair: {**pair[0], **pair[1]})

_parts = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["input_text", "output_text", "reasoning_text", "input_file", "input_image"]
        )
    },
    optional={"text": st.text(max_size=3) | _scalars},
) | st.fixed_dictionaries(
    {"type": st.just("input_file")},
    optional={
        "file_data": _data | _scalars,
        "file_url": _data | _scalars,
        "file_id": st.text(max_size=3),
        "filename": st.text(max_size=3) | _scalars,
    },
)
_texts = st.text(max_size=3) | st.lists(_parts | _values, max_size=2) | _scalars
responses_items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
        )
        | _scalars,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | _scalars,
        "content": _texts,
        "call_id": st.text(max_size=3),
        "name": st.text(max_size=3),
        "arguments": st.sampled_from(["{}", "{", "[1]", ""]) | _scalars,
        "output": _texts,
        "summary": st.lists(_parts, max_size=2) | _scalars,
    },
)
_functions = st.fixed_dictionaries(
    {"type": st.just("function") | _scalars},
    optional={
        "name": st.text(max_size=3),
        "parameters": st.dictionaries(st.text(max_size=4), _values, max_size=2) | _scalars,
        "strict": st.booleans() | _scalars,
    },
)
_RESPONSES_FIELDS = [
    *responses_bodies.ResponsesBody.model_fields,
    *responses_bodies.CHAT_FIELDS,
    *responses_bodies.IGNORED_FIELDS,
    *responses_bodies.ACCEPTED_VALUES,
    "x",
]
responses_requests = st.tuples(
    st.just({}) | st.dictionaries(st.sampled_from(_RESPONSES_FIELDS), _values, max_size=2),
    st.fixed_dictionaries(
        {"input": st.text(max_size=3) | st.lists(responses_items, max_size=3)},
        optional={
            "tools": st.just([{"type": "function", "name": "see"}])
            | st.lists(_functions, max_size=2),
            "tool_choice": st.sampled_from(["auto", "required", "none"]) | _functions,
            "text": st.just({}) | st.fixed_dictionaries({"format": _values}),
            "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "low"])}),
        },
    ),
).map(lambda pair: {**pair[0], **pair[1]})
