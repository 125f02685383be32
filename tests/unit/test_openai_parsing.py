"""Reasoning and tool calls in the forms that models write."""

from __future__ import annotations

import pytest

from engine.errors import InvalidConfig
from router.openai.parsing import Delta, Parsing, ToolCall

CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'


def read(parsing: Parsing, text: str, *, with_tools: bool = True) -> Delta:
    reader = parsing.reader(with_tools=with_tools)
    return reader.push(text) + reader.finish()


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("qwen3", "<think>\nwhy\n</think>\n\nso", Delta("\n\nso", "\nwhy\n")),
        ("qwen3", " <think>why", Delta("", "why")),
        ("qwen3", "no <think>why</think>", Delta("no <think>why</think>")),
        ("qwen3", "<thi", Delta("<thi")),
        ("deepseek_r1", "why</think>so", Delta("so", "why")),
        ("deepseek_r1", "<think>why</think>so </think>", Delta("so </think>", "why")),
        ("deepseek_r1", "why </thin", Delta("", "why </thin")),
    ],
)
def test_reasoning_is_told_apart(parser: str, text: str, expected: Delta) -> None:
    assert read(Parsing(reasoning=parser), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALLED, Delta(calls=(ToolCall("f", '{"x": "ü"}'),))),
        (f"let me\n{CALLED}\n", Delta("let me\n", calls=(ToolCall("f", '{"x": "ü"}'),))),
        (f"{CALLED}\n{CALLED}", Delta(calls=(ToolCall("f", '{"x": "ü"}'),) * 2)),
        (f"{CALLED} done ", Delta(" done", calls=(ToolCall("f", '{"x": "ü"}'),))),
        ("<tool_call>{oh}</tool_call> no", Delta("<tool_call>{oh}</tool_call> no")),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
            Delta('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ),
        ('<tool_call>{"name": "f"', Delta('<tool_call>{"name": "f"')),
        (
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            Delta('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ),
    ],
)
def test_hermes_calls_are_read(text: str, expected: Delta) -> None:
    assert read(Parsing(tools="hermes"), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', Delta(calls=(ToolCall("f", '{"x": 1}'),))),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}\n',
            Delta(calls=(ToolCall("f", "{}"), ToolCall("g", "{}"))),
        ),
        (
            '{"name": "\\ud800", "parameters": {}}',
            Delta('{"name": "\\ud800", "parameters": {}}'),
        ),
        ('{"name": "f"} and more', Delta('{"name": "f"} and more')),
        ('{"name": "f", "param', Delta('{"name": "f", "param')),
        ("plain {", Delta("plain {")),
    ],
)
def test_llama_calls_are_read(text: str, expected: Delta) -> None:
    assert read(Parsing(tools="llama3_json"), text) == expected


def test_calls_may_follow_reasoning() -> None:
    told = read(Parsing("hermes", "qwen3"), f"<think>{CALLED}</think>{CALLED}")

    assert told == Delta("", CALLED, (ToolCall("f", '{"x": "ü"}'),))


def test_text_that_holds_nothing_is_told_at_once() -> None:
    reader = Parsing("hermes", "qwen3").reader(with_tools=True)
    assert [reader.push(piece).content for piece in ("a", " b", " <too", "th")] == [
        *("a", " b", " ", "<tooth")
    ]


def test_without_tools_no_call_is_looked_for() -> None:
    assert read(Parsing(tools="hermes"), CALLED, with_tools=False) == Delta(CALLED)


def test_an_unknown_parser_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match="choose one of hermes, llama3_json"):
        Parsing(tools="other")
