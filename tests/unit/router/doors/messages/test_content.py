"""Content blocks of Anthropic's API."""

from __future__ import annotations

import pytest

from baton.router.doors.messages.response import ContentBlocks, whole_content
from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
)

TEXTS: list[TextEvent] = [
    ReasoningDelta("hm"),
    ReasoningDelta("m"),
    TextDelta("I "),
    TextDelta("look."),
    ToolCall("see", '{"x":'),
    ArgumentsDelta(" 1}"),
    CallEnd(),
    ToolCall("rest"),
    CallEnd(),
    TextDelta("Done."),
]


def events_of(texts: list[TextEvent], *, hides_thinking: bool = False) -> list[Json]:
    blocks = ContentBlocks(hides_thinking=hides_thinking)
    return [*blocks.events(texts), *blocks.end()]


def test_each_block_starts_and_stops_once_and_in_order() -> None:
    events = events_of(TEXTS)

    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    assert kinds == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)],
        *[("start", 3), ("stop", 3)],
        *[("start", 4), ("delta", 4), ("stop", 4)],
    ]


def test_the_whole_content_is_that_of_the_events() -> None:
    thinking, text, see, rest, end = whole_content(events_of(TEXTS))

    assert thinking == {"type": "thinking", "thinking": "hmm", "signature": ""}
    assert (text, end) == (
        {"type": "text", "text": "I look."},
        {"type": "text", "text": "Done."},
    )
    assert (see["name"], see["input"]) == ("see", {"x": 1})
    assert (rest["name"], rest["input"]) == ("rest", {})
    assert see["id"] != rest["id"]
    assert see["id"].startswith("toolu_")


def test_omitted_thinking_is_an_empty_block() -> None:
    events = events_of(TEXTS, hides_thinking=True)

    assert whole_content(events)[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["type"] for event in events[:2]] == ["content_block_start", "content_block_stop"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": [1, 2]}', {"x": [1, 2]}),
        ('{"x": 1e400}', {"x": 10**400}),  # infinity would not be JSON
        (f'{{"x": {"[" * 300}{"]" * 300}}}', {}),
    ],
)
def test_the_arguments_of_a_call_are_its_input(arguments: str, expected: object) -> None:
    [call] = whole_content(events_of([ToolCall("see", arguments), CallEnd()]))

    assert call["input"] == expected


def test_a_call_that_does_not_end_has_no_stop_and_is_no_block() -> None:
    cut = ToolCall("see", '{"x": 1')
    events = events_of([cut, TextDelta("so"), cut])

    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    assert whole_content(events) == [{"type": "text", "text": "so"}]
    assert [index for kind, index in kinds if kind == "start"] == [0, 1, 2]
    assert [index for kind, index in kinds if kind == "stop"] == [1]


def test_an_answer_without_text_has_no_blocks() -> None:
    assert events_of([]) == []
