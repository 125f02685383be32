"""Hostile Anthropic requests: accepted or refused by name; streamed and whole answers agree."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import NamedError
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.router.doors.messages.bodies import CHAT_FIELDS, IGNORED_FIELDS, MessagesBody
from baton.router.doors.messages.content import ContentBlocks, whole_content
from baton.router.doors.messages.errors import error_body
from baton.router.doors.messages.parsed_message import message_from, prompt_to_count
from baton.router.doors.openai.request.parsed_request import ModelContext
from baton.router.http.bodies import json_object
from baton.router.http.errors import failure_of
from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
    fold,
)

CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 512)
numbers = st.integers() | st.sampled_from([-1, 0, 1, 2**31 - 1, 2**31, 2**63, 10**400])
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
caches = st.fixed_dictionaries({"type": st.just("ephemeral")}, optional={"ttl": scalars})
blocks = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "thinking", "tool_use", "tool_result", "image", "redacted_thinking"]
        )
    },
    optional={
        "text": st.text(max_size=3) | scalars,
        "thinking": st.text(max_size=3),
        "id": st.text(max_size=3),
        "name": st.text(max_size=3) | scalars,
        "input": st.dictionaries(st.text(max_size=3), values, max_size=2) | scalars,
        "tool_use_id": st.text(max_size=3) | scalars,
        "content": st.text(max_size=3) | st.lists(values, max_size=2) | scalars,
        "cache_control": caches | scalars,
    },
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"])},
    optional={"content": st.text(max_size=3) | st.lists(blocks | values, max_size=3) | scalars},
)
tools = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=3),
        "input_schema": st.dictionaries(st.text(max_size=4), values, max_size=2) | scalars,
        "type": st.just("custom") | scalars,
        "strict": st.booleans() | scalars,
    },
)
FIELDS = [*MessagesBody.model_fields, *CHAT_FIELDS, *IGNORED_FIELDS, "context_management", "x"]
bodies = st.tuples(
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=4),
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 99)},
        optional={
            "messages": st.lists(messages, max_size=3),
            "system": st.text(max_size=3) | st.lists(blocks, max_size=2),
            "tools": st.lists(tools, max_size=2),
            "tool_choice": st.fixed_dictionaries(
                {"type": st.sampled_from(["auto", "any", "tool", "none"])},
                optional={"name": st.text(max_size=3)},
            ),
            "thinking": st.fixed_dictionaries({"type": st.just("enabled")}),
            "stop_sequences": st.lists(st.text(max_size=3), max_size=3),
        },
    ),
).map(lambda pair: {**pair[0], **pair[1]})


@given(bodies)
def test_a_request_is_accepted_or_refused_by_name_in_anthropics_format(
    fields: dict[str, Any],
) -> None:
    body = json.dumps(fields).encode()
    for read in (lambda parsed: message_from(parsed, "id", CONTEXT), _count):
        try:
            read(json_object(body))
        except NamedError as refusal:
            failure = failure_of(refusal)
            error = error_body(failure)["error"]
            assert (failure.status, error["type"]) == (400, "invalid_request_error")
            assert error["message"]


def _count(fields: dict[str, Any]) -> object:
    return prompt_to_count(
        {name: value for name, value in fields.items() if name not in ("max_tokens", "stop")},
        CONTEXT,
    )


some_text = st.text(min_size=1, max_size=4)
calls = st.builds(ToolCall, st.sampled_from(["see", "f"]), st.sampled_from(["", "{", '{"x": 1}']))
events = st.lists(st.builds(TextDelta, some_text) | st.builds(ReasoningDelta, some_text) | calls)


@given(events, st.data())
def test_a_streamed_answer_equals_the_whole_one(
    texts: list[TextEvent], data: st.DataObject
) -> None:
    more = ArgumentsDelta('"y": 2')
    texts = [
        each
        for event in texts
        for each in ((event, more) if isinstance(event, ToolCall) else (event,))
    ]
    cut = data.draw(st.integers(0, len(texts)))
    in_pieces = ContentBlocks()
    streamed: list[Json] = [*in_pieces.events(texts[:cut]), *in_pieces.events(texts[cut:])]
    streamed += in_pieces.end()

    content, folded = whole_content(streamed), fold(texts)

    assert "".join(block.get("text", "") for block in content) == folded.content
    assert "".join(block.get("thinking", "") for block in content) == folded.reasoning
    names = [block["name"] for block in content if block["type"] == "tool_use"]
    assert names == [call.name for call in folded.calls]
    kinds = [block["type"] for block in content]
    repeated = [one for one, other in pairwise(kinds) if one == other]
    assert set(repeated) <= {"tool_use"}
