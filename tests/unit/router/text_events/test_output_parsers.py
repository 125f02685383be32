"""Parsers of reasoning and tool calls in model outputs."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.router.text_events.output_parsers import Delta, Parsing, ToolCall

CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'


MARKED = '{"name": "f", "arguments": {"x": "a</tool_call>\\"</tool_call>"}}'
CUT_OFF = '{"name": "g", "parameters": {"x": 1'


def read(
    parsing: Parsing, text: str, *, with_tools: bool = True, is_cut_off: bool = False
) -> Delta:
    reader = parsing.reader(with_tools=with_tools)
    return reader.push(text) + reader.finish(is_cut_off=is_cut_off)


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
def test_reasoning_is_separated_from_the_answer(parser: str, text: str, expected: Delta) -> None:
    assert read(Parsing(reasoning=parser), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALLED, Delta(calls=(ToolCall("f", '{"x": "ü"}'),))),
        (f"let me\n{CALLED}\n", Delta("let me", calls=(ToolCall("f", '{"x": "ü"}'),))),
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


def test_a_closing_mark_in_a_json_string_does_not_end_a_call() -> None:
    call = ToolCall("f", '{"x": "a</tool_call>\\"</tool_call>"}')

    reported = read(Parsing(tools="hermes"), f"<tool_call>{MARKED}</tool_call>{CALLED}")

    assert reported == Delta(calls=(call, ToolCall("f", '{"x": "ü"}')))


def test_a_string_without_an_end_does_not_hide_the_calls_behind_it() -> None:
    broken = '<tool_call>{"name: f}</tool_call>'

    reported = read(Parsing(tools="hermes"), broken + CALLED)

    assert reported == Delta(broken, calls=(ToolCall("f", '{"x": "ü"}'),))


def test_whitespace_next_to_calls_is_no_content() -> None:
    reported = read(Parsing("hermes", "qwen3"), f"<think>why</think>\n\n{CALLED}\n\n{CALLED}\n")

    assert reported == Delta("", "why", (ToolCall("f", '{"x": "ü"}'),) * 2)


def test_a_last_call_may_lack_its_closing_mark() -> None:
    reported = read(Parsing(tools="hermes"), CALLED.removesuffix("</tool_call>"))

    assert reported == Delta(calls=(ToolCall("f", '{"x": "ü"}'),))


@pytest.mark.parametrize(
    ("parser", "text", "begun"),
    [
        ("hermes", CALLED, '<tool_call>\n{"name": "f", "argu'),
        ("hermes", CALLED, "<tool_ca"),
        ("llama3_json", '{"name": "f", "arguments": {"x": "ü"}}', CUT_OFF),
    ],
)
@pytest.mark.parametrize("between", ["\n", "; "])
def test_a_call_that_is_cut_off_takes_none_before_it_along(
    parser: str, text: str, begun: str, between: str
) -> None:
    whole = Delta(calls=(ToolCall("f", '{"x": "ü"}'),))
    sign = ";" if parser == "hermes" and between == "; " else ""

    cut_off = read(Parsing(tools=parser), text + between + begun, is_cut_off=True)
    ended = read(Parsing(tools=parser), text + between + begun)

    assert cut_off == whole._replace(content=sign)
    assert ended == whole._replace(content=between + begun if parser == "hermes" else begun)


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", ""), ("I look.", "I look."), ("I look.\n", "I look."), ("a <|python_tag|>b ", None)],
)
def test_text_may_stand_before_the_python_tag(before: str, expected: str | None) -> None:
    text = before + '<|python_tag|>{"name": "f", "parameters": {}}'

    reported = read(Parsing(tools="llama3_json"), text)

    content = before.rstrip() if expected is None else expected
    assert reported == Delta(content, calls=(ToolCall("f", "{}"),))


def test_a_python_tag_before_anything_else_is_content() -> None:
    text = "a <|python_tag|>print(1) <|python_tag|> <|python_"
    assert read(Parsing(tools="llama3_json"), text) == Delta(text)


def test_calls_may_follow_reasoning() -> None:
    reported = read(Parsing("hermes", "qwen3"), f"<think>{CALLED}</think>{CALLED}")

    assert reported == Delta("", CALLED, (ToolCall("f", '{"x": "ü"}'),))


def test_text_without_a_possible_tag_is_returned_at_once() -> None:
    reader = Parsing("hermes", "qwen3").reader(with_tools=True)
    assert [reader.push(piece).content for piece in ("a", " b", " <too", "th")] == [
        *("a", " b", "", " <tooth")
    ]


def test_without_tools_no_call_is_looked_for() -> None:
    assert read(Parsing(tools="hermes"), CALLED, with_tools=False) == Delta(CALLED)


def test_an_unknown_parser_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match="choose one of hermes, llama3_json"):
        Parsing(tools="other")
