"""Output items of Responses."""

from __future__ import annotations

from baton.router.doors.responses.response_object import INCOMPLETE, OutputItems
from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    ToolCall,
)


def test_items_are_added_and_done_in_order_with_their_texts() -> None:
    items = OutputItems()

    events: list[Json] = [
        *items.events([ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("I look.")]),
        *items.events([ToolCall("see", '{"x":'), ArgumentsDelta(" 1}"), CallEnd()]),
        *items.end(),
    ]

    assert [
        (event["type"].removeprefix("response."), event["output_index"]) for event in events
    ] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
    ]
    reasoning, message, call = items.items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [part["text"] for part in message["content"]] == ["I look."]
    assert (call["name"], call["arguments"]) == ("see", '{"x": 1}')
    assert {item["status"] for item in items.items} == {"completed"}
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == items.items


def test_the_last_item_of_an_answer_that_is_cut_off_is_incomplete() -> None:
    items = OutputItems()

    added, *_ = items.events([ToolCall("see"), CallEnd(), TextDelta("tex")])
    assert [*items.end(INCOMPLETE)]

    assert [item["status"] for item in items.items] == ["completed", "incomplete"]
    assert added["item"]["status"] == "in_progress"


def test_a_call_that_does_not_end_is_neither_done_nor_an_item() -> None:
    items = OutputItems()

    events = [
        *items.events([ToolCall("see", '{"x":'), TextDelta("tex")]),
        *items.events([ToolCall("see", '{"x":')]),
        *items.end(INCOMPLETE),
    ]

    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert [item["type"] for item in items.items] == ["message"]
    assert done == items.items
    assert items.has_unended_call
    assert not any(event["type"].endswith("arguments.done") for event in events)
    added = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    assert added == [0, 1, 2]  # an index is not used again


def test_an_answer_without_text_has_no_items() -> None:
    items = OutputItems()

    assert [*items.events([]), *items.end()] == items.items == []


def test_a_call_of_a_namespace_has_both_names() -> None:
    items = OutputItems({"zoo__see": ("zoo", "see")})

    [*items.events([ToolCall("zoo__see", "{}"), CallEnd()]), *items.end()]

    assert [(item["namespace"], item["name"]) for item in items.items] == [("zoo", "see")]
