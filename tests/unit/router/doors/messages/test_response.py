"""Ends of Anthropic's messages."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.output import Finish, FinishReason, Served
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.router.doors.messages.parsed_message import message_from
from baton.router.doors.messages.response import MessageResponse
from baton.router.doors.openai.request.parsed_request import ModelContext
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.values import Parsing, TokenChunk

CALL = '<tool_call>{"name": "see", "arguments": {}}</tool_call>'
SERVED = Served("p", "d", True, "", 0, 0, "", 0, 0, 1)
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 9,
    "tools": [{"name": "see", "input_schema": {"type": "object"}}],
}


def ending(reason: FinishReason, stop_string: str | None = None, **fields: Any) -> Finish:
    return Finish(reason, 5, 3, 0, 1, 1, 2, SERVED, stop_string=stop_string, **fields)


@pytest.mark.parametrize(
    ("text", "end", "stop_reason"),
    [
        ("well", ending(FinishReason.STOP), "end_turn"),
        ("well", ending(FinishReason.STOP, "END"), "stop_sequence"),
        ("well", ending(FinishReason.LENGTH), "max_tokens"),
        (
            "well",
            ending(FinishReason.LENGTH, warnings=("max_tokens 9 was lowered to 3",)),
            "model_context_window_exceeded",
        ),
        (CALL, ending(FinishReason.STOP), "tool_use"),
        (CALL, ending(FinishReason.LENGTH), "max_tokens"),
    ],
)
def test_each_end_has_its_stop_reason(text: str, end: Finish, stop_reason: str) -> None:
    context = ModelContext(NO_SAMPLING_DEFAULTS, 512, Parsing("hermes"))
    response = MessageResponse(message_from(BODY, "id", context), "id", "tiny", TextBoundary())

    events = [*response.content_events(TokenChunk(0, (1,), text)), *response.content_events(end)]
    whole = response.whole(events, end)

    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, end.stop_string)
    assert whole["warnings"][0].startswith("tools: this model's chat template")
