"""Text events, as an API other than OpenAI's would take them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.output import Finish, FinishReason, Served
from baton.router.text_events.events import (
    AnswerText,
    ArgumentsDelta,
    CallEnd,
    EventReader,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
    fold,
)
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.values import Parsing, TokenChunk

SERVED = Served("p", "d", True, "", 0, 0, "", 0, 0, 1)
END = Finish(FinishReason.STOP, 5, 3, 0, 1, 1, 2, SERVED)
TEXT = '<think>why</think>so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> done'


def blocks_of(events: list[TextEvent]) -> list[tuple[str, str]]:
    """Return content blocks in the order of the answer, as Anthropic's API has them."""
    blocks: list[tuple[str, str]] = []
    for event in events:
        match event:
            case TextDelta(text):
                kind, more = "text", text
            case ReasoningDelta(text):
                kind, more = "thinking", text
            case ToolCall(name, arguments):
                blocks.append((name, arguments))
                continue
            case CallEnd():
                blocks.append(("end of call", ""))
                continue
            case ArgumentsDelta(arguments):
                kind, more = blocks[-1][0], arguments
        if not blocks or blocks[-1][0] != kind:
            blocks.append((kind, ""))
        blocks[-1] = (kind, blocks[-1][1] + more)
    return blocks


def test_events_keep_the_order_of_text_reasoning_and_calls() -> None:
    reader = EventReader(TextFormat(Parsing("hermes", "qwen3"), ToolCallMode.BY_MODEL).parser, 1)

    parts = [reader.read(0, TokenChunk(place, text=text)) for place, text in enumerate(TEXT)]

    assert blocks_of([event for part in parts for event in part]) == [
        ("thinking", "why"),
        ("text", "so"),
        ("f", '{"x": 1}'),
        ("end of call", ""),
        ("text", "  done"),
    ]


def test_the_argument_chunks_of_calls_that_have_ended_are_joined() -> None:
    first: list[TextEvent] = [ToolCall("f", "{"), ArgumentsDelta("}"), CallEnd()]
    second: list[TextEvent] = [ToolCall("g"), ArgumentsDelta("{}")]

    assert fold([*first, *second]).calls == (ToolCall("f", "{}"),)
    assert fold([*first, *second]).num_unended_calls == 1
    assert fold([*second, *first, *second, CallEnd()]) == AnswerText(
        calls=(ToolCall("f", "{}"), ToolCall("g", "{}")), num_unended_calls=1
    )


@pytest.mark.parametrize(
    ("end", "num_calls"),
    [
        (replace(END, reason=FinishReason.LENGTH), 0),
        (replace(END, stop_string="END"), 0),
        (END, 1),
    ],
)
def test_what_cuts_an_answer_off_ends_no_call(end: Finish, num_calls: int) -> None:
    """A number has no last character: it ends with an answer that the model ends."""
    forced = TextFormat(tool_calls=ToolCallMode.NAMED, function="f")
    reader = EventReader(forced.parser, 1)

    events = [*reader.read(0, TokenChunk(0, text="12")), *reader.read(0, end)]

    assert len(fold(events).calls) == num_calls


def test_each_answer_has_its_own_parser() -> None:
    reader = EventReader(TextFormat(Parsing(reasoning="qwen3")).parser, 2)

    first = reader.read(0, TokenChunk(0, text="<think>a"))
    second = reader.read(1, TokenChunk(0, text="b"))

    assert (first, second) == ([ReasoningDelta("a")], [TextDelta("b")])
