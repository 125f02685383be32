"""Hostile Anthropic requests: accepted or refused by name; streamed and whole answers agree."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import NamedError
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.router.doors.messages.errors import error_body
from baton.router.doors.messages.parsed_message import message_from, prompt_to_count
from baton.router.doors.messages.response import ContentBlocks, whole_content
from baton.router.doors.openai.request.parsed_request import ModelContext
from baton.router.http.bodies import json_object
from baton.router.http.errors import failure_of
from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
    fold,
)
from tests.support.hostile_bodies import messages_requests

CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 512)


@given(messages_requests)
def test_a_request_is_accepted_or_refused_by_name_in_anthropics_format(
    fields: dict[str, Any],
) -> None:
    body = json.dumps(fields).encode()
    for read in (lambda parsed: message_from(parsed, "id", CONTEXT), _count):
        try:
            parsed = json_object(body)
            read(parsed)
        except NamedError as refusal:
            failure = failure_of(refusal)
            error = error_body(failure)["error"]
            assert (failure.status, error["type"]) == (400, "invalid_request_error")
            assert error["message"]


def _count(fields: dict[str, Any]) -> object:
    return prompt_to_count(
        {name: value for name, value in fields.items() if name != "max_tokens"},
        CONTEXT,
    )


some_text = st.text(min_size=1, max_size=4)
begins = st.builds(ToolCall, st.sampled_from(["see", "f"]), st.sampled_from(["", "{", '{"x": 1}']))
calls = st.tuples(begins, st.just(ArgumentsDelta('"y": 2'))) | st.tuples(
    begins, st.just(ArgumentsDelta("}")), st.just(CallEnd())
)
words = st.builds(TextDelta, some_text) | st.builds(ReasoningDelta, some_text)
events = st.lists(st.tuples(words) | calls)


@given(events, st.data())
def test_a_streamed_answer_equals_the_whole_one(
    groups: list[tuple[TextEvent, ...]], data: st.DataObject
) -> None:
    texts = [event for group in groups for event in group]
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
    assert set(repeated) <= {"tool_use"} or folded.num_unended_calls
    assert in_pieces.has_only_whole_calls == bool(names and not folded.num_unended_calls)
