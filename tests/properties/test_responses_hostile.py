"""Hostile Responses requests: accepted or refused by name."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import NamedError
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.router.doors.openai.errors import error_body
from baton.router.doors.openai.request.parsed_request import ModelContext
from baton.router.doors.responses.parsed_response import response_from
from baton.router.doors.responses.response_object import OutputItems
from baton.router.http.bodies import json_object
from baton.router.http.errors import failure_of
from baton.router.http.json_encoding import as_json
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    fold,
)
from tests.support.hostile_bodies import responses_items, responses_requests

CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 512)


@given(responses_requests, st.lists(responses_items, max_size=1))
def test_a_request_is_accepted_or_refused_by_name(
    fields: dict[str, Any], history: list[Any]
) -> None:
    body, before = json.dumps(fields).encode(), json.dumps(history).encode()
    try:
        parsed = response_from(json_object(body), before, "id", CONTEXT)
    except NamedError as refusal:
        failure = failure_of(refusal)
        error = error_body(failure)["error"]
        assert (failure.status, error["type"]) == (400, "invalid_request_error")
        assert error["message"]
    else:
        as_json({**parsed.echo, "items": list(parsed.items)})


some_text = st.text(min_size=1, max_size=4)
arguments = st.sampled_from(["", "{", '{"x": 1}'])
unended = st.tuples(st.builds(ToolCall, st.just("see"), arguments), st.just(ArgumentsDelta("}")))
calls = unended | unended.map(lambda call: (*call, CallEnd()))
one_text = st.builds(TextDelta, some_text) | st.builds(ReasoningDelta, some_text)
events = st.lists(one_text.map(lambda event: (event,)) | calls).map(
    lambda groups: [event for group in groups for event in group]
)


@given(events)
def test_a_streamed_answer_equals_the_whole_one(text_events: list[Any]) -> None:
    output = OutputItems()
    streamed = [*output.events(text_events), *output.end()]
    folded = fold(text_events)

    by_kind = {"message": "", "reasoning": ""}
    for item in output.items:
        if item["type"] in by_kind:
            by_kind[item["type"]] += item["content"][0]["text"]
    deltas = {
        kind: "".join(event["delta"] for event in streamed if event["type"] == f"response.{name}")
        for kind, name in (("message", "output_text.delta"), ("reasoning", "reasoning_text.delta"))
    }
    assert by_kind == deltas == {"message": folded.content, "reasoning": folded.reasoning}
    made = [(item["name"], item["arguments"]) for item in output.items if "name" in item]
    assert made == [(call.name, call.arguments) for call in folded.calls]
