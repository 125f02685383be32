"""Parsers of reasoning and tool calls in model outputs."""

from __future__ import annotations

import pytest

from baton.router.text_events.events import AnswerText, TextDelta, ToolCall, fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.values import Parsing

CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'


MARKED = '{"name": "f", "arguments": {"x": "a</tool_call>\\"</tool_call>"}}'
CUT_OFF = '{"name": "g", "parameters": {"x": 1'


def read(
    parsing: Parsing, text: str, *, with_tools: bool = True, is_cut_off: bool = False
) -> AnswerText:
    parser = TextFormat(
        parsing, ToolCallMode.BY_MODEL if with_tools else ToolCallMode.NONE
    ).parser()
    return fold([*parser.push(text), *parser.finish(is_cut_off=is_cut_off)])


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("qwen3", "<think>\nwhy\n</think>\n\nso", AnswerText("\n\nso", "\nwhy\n")),
        ("qwen3", " <think>why", AnswerText("", "why")),
        ("qwen3", "no <think>why</think>", AnswerText("no <think>why</think>")),
        ("qwen3", "<thi", AnswerText("<thi")),
        ("deepseek_r1", "why</think>so", AnswerText("so", "why")),
        ("deepseek_r1", "<think>why</think>so </think>", AnswerText("so </think>", "why")),
        ("deepseek_r1", "why </thin", AnswerText("", "why </thin")),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    parser: str, text: str, expected: AnswerText
) -> None:
    assert read(Parsing(reasoning=parser), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALLED, AnswerText(calls=(ToolCall("f", '{"x": "ü"}'),))),
        (f"let me\n{CALLED}\n", AnswerText("let me", calls=(ToolCall("f", '{"x": "ü"}'),))),
        (f"{CALLED}\n{CALLED}", AnswerText(calls=(ToolCall("f", '{"x": "ü"}'),) * 2)),
        (f"\n{CALLED} so", AnswerText(" so", calls=(ToolCall("f", '{"x": "ü"}'),))),
        (f"{CALLED} done ", AnswerText(" done", calls=(ToolCall("f", '{"x": "ü"}'),))),
        ("<tool_call>{oh}</tool_call> no", AnswerText("<tool_call>{oh}</tool_call> no")),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
            AnswerText(
                '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
                num_unended_calls=1,
            ),
        ),
        ('<tool_call>{"name": "f"', AnswerText('<tool_call>{"name": "f"')),
        (
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            AnswerText(
                '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
                num_unended_calls=1,
            ),
        ),
    ],
)
def test_hermes_calls_are_parsed(text: str, expected: AnswerText) -> None:
    assert read(Parsing(tools="hermes"), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', AnswerText(calls=(ToolCall("f", '{"x": 1}'),))),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}\n',
            AnswerText(calls=(ToolCall("f", "{}"), ToolCall("g", "{}"))),
        ),
        (
            '{"name": "\\ud800", "parameters": {}}',
            AnswerText('{"name": "\\ud800", "parameters": {}}'),
        ),
        ('{"name": "f"} and more', AnswerText('{"name": "f"} and more')),
        ('{"name": "f", "param', AnswerText('{"name": "f", "param')),
        ("plain {", AnswerText("plain {")),
    ],
)
def test_llama_calls_are_parsed(text: str, expected: AnswerText) -> None:
    assert read(Parsing(tools="llama3_json"), text) == expected


def test_a_closing_tag_in_a_json_string_does_not_end_a_call() -> None:
    call = ToolCall("f", '{"x": "a</tool_call>\\"</tool_call>"}')

    reported = read(Parsing(tools="hermes"), f"<tool_call>{MARKED}</tool_call>{CALLED}")

    assert reported == AnswerText(calls=(call, ToolCall("f", '{"x": "ü"}')))


def test_an_unterminated_string_does_not_hide_later_calls() -> None:
    broken = '<tool_call>{"name: f}</tool_call>'

    reported = read(Parsing(tools="hermes"), broken + CALLED)

    assert reported == AnswerText(broken, calls=(ToolCall("f", '{"x": "ü"}'),))


def test_whitespace_next_to_calls_is_no_content() -> None:
    reported = read(Parsing("hermes", "qwen3"), f"<think>why</think>\n\n{CALLED}\n\n{CALLED}\n")

    assert reported == AnswerText("", "why", (ToolCall("f", '{"x": "ü"}'),) * 2)


def test_the_last_call_can_lack_its_closing_tag() -> None:
    reported = read(Parsing(tools="hermes"), CALLED.removesuffix("</tool_call>"))

    assert reported == AnswerText(calls=(ToolCall("f", '{"x": "ü"}'),))


@pytest.mark.parametrize(
    ("parser", "text", "begun"),
    [
        ("hermes", CALLED, '<tool_call>\n{"name": "f", "argu'),
        ("hermes", CALLED, "<tool_ca"),
        ("llama3_json", '{"name": "f", "arguments": {"x": "ü"}}', CUT_OFF),
    ],
)
@pytest.mark.parametrize("between", ["\n", "; "])
def test_a_truncated_call_does_not_drop_earlier_calls(
    parser: str, text: str, begun: str, between: str
) -> None:
    whole = AnswerText(calls=(ToolCall("f", '{"x": "ü"}'),))
    sign = ";" if parser == "hermes" and between == "; " else ""

    cut_off = read(Parsing(tools=parser), text + between + begun, is_cut_off=True)
    ended = read(Parsing(tools=parser), text + between + begun)

    assert cut_off == whole._replace(content=sign)
    assert ended == whole._replace(content=between + begun if parser == "hermes" else begun)


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", ""), ("I look.", "I look."), ("I look.\n", "I look."), ("a <|python_tag|>b ", None)],
)
def test_text_can_precede_the_python_tag(before: str, expected: str | None) -> None:
    text = before + '<|python_tag|>{"name": "f", "parameters": {}}'

    reported = read(Parsing(tools="llama3_json"), text)

    content = before.rstrip() if expected is None else expected
    assert reported == AnswerText(content, calls=(ToolCall("f", "{}"),))


def test_a_python_tag_that_arrives_in_parts_begins_a_call() -> None:
    parser = TextFormat(Parsing(tools="llama3_json"), ToolCallMode.BY_MODEL).parser()
    parts = ("I look.<|pytho", 'n_tag|>{"name": "f", ', '"parameters": {}}')

    events = [event for part in parts for event in parser.push(part)]

    assert fold([*events, *parser.finish()]) == AnswerText("I look.", calls=(ToolCall("f", "{}"),))


def test_a_python_tag_before_anything_else_is_content() -> None:
    text = "a <|python_tag|>print(1) <|python_tag|> <|python_"
    assert read(Parsing(tools="llama3_json"), text) == AnswerText(text)


def test_calls_may_follow_reasoning() -> None:
    reported = read(Parsing("hermes", "qwen3"), f"<think>{CALLED}</think>{CALLED}")

    assert reported == AnswerText("", CALLED, (ToolCall("f", '{"x": "ü"}'),))


def test_text_without_a_possible_tag_is_returned_at_once() -> None:
    parser = TextFormat(Parsing("hermes", "qwen3"), ToolCallMode.BY_MODEL).parser()
    assert [parser.push(chunk) for chunk in ("a", " b", " <too", "th")] == [
        *([TextDelta("a")], [TextDelta(" b")], [], [TextDelta(" <tooth")])
    ]


def test_without_tools_no_call_is_parsed() -> None:
    assert read(Parsing(tools="hermes"), CALLED, with_tools=False) == AnswerText(CALLED)
