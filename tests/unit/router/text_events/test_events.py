"""Text events, as an API other than OpenAI's would take them."""

from __future__ import annotations

from baton.router.text_events.events import (
    ArgumentsDelta,
    EventReader,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
    fold,
)
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.values import Parsing, TokenChunk

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
        ("text", "  done"),
    ]


def test_the_argument_chunks_of_a_call_are_joined() -> None:
    first: list[TextEvent] = [ToolCall("f", "{"), ArgumentsDelta("}")]

    assert fold([*first, ToolCall("g"), ArgumentsDelta("{}")]).calls == (
        ToolCall("f", "{}"),
        ToolCall("g", "{}"),
    )


def test_each_answer_has_its_own_parser() -> None:
    reader = EventReader(TextFormat(Parsing(reasoning="qwen3")).parser, 2)

    first = reader.read(0, TokenChunk(0, text="<think>a"))
    second = reader.read(1, TokenChunk(0, text="b"))

    assert (first, second) == ([ReasoningDelta("a")], [TextDelta("b")])
