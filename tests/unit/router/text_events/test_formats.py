"""Formats of tool calls: an answer of each, and the chat templates that announce them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from baton.router.text_events.events import AnswerText, ArgumentsDelta, TextEvent, ToolCall, fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.table import TOOL_FORMATS, parsing_of_template
from baton.router.values import Parsing
from tests.support.written_calls import WRITERS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string"}, "n": {"type": ["integer", "null"]}},
            },
        },
    }
]
ARGUMENTS = {"x": 'a "b" \\ {c}', "n": 2}
# Formats that become JSON when a call is complete.
TRANSLATED = ("pythonic", "llama4_pythonic", "lfm2", "gemma4", "functiongemma")


def events_of(
    parsing: Parsing,
    chunks: Sequence[str],
    *,
    is_cut_off: bool = False,
    prompt_end: str = "",
) -> list[TextEvent]:
    parser = TextFormat(parsing, ToolCallMode.BY_MODEL, tools=TOOLS).parser(prompt_end)
    pushed = [event for chunk in chunks for event in parser.push(chunk)]
    return [*pushed, *parser.finish(is_cut_off=is_cut_off)]


def read(parsing: Parsing, text: str, *, prompt_end: str = "") -> AnswerText:
    return fold(events_of(parsing, [text], prompt_end=prompt_end))


def joined(arguments: Sequence[TextEvent]) -> str:
    return "".join(each.arguments for each in arguments if isinstance(each, ArgumentsDelta))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_each_format_has_parallel_calls_and_text_before_them(name: str) -> None:
    write = WRITERS[name]

    found = read(Parsing(name), write("", [("f", ARGUMENTS), ("g", {})]))

    assert [call.name for call in found.calls] == ["f", "g"]
    assert [json.loads(call.arguments) for call in found.calls] == [ARGUMENTS, {}]
    assert (found.content.strip(), found.reasoning) == ("", "")
    if write.has_text_before:
        assert read(Parsing(name), write("so", [("g", {})])).content == "so"


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - set(TRANSLATED)))
def test_arguments_arrive_before_their_call_is_complete(name: str) -> None:
    text = WRITERS[name]("", [("f", {"x": "a" * 40})])
    begun = text[: text.rindex("aaaa")]

    events = events_of(Parsing(name), list(begun), is_cut_off=True)

    called, *arguments = (event for event in events if isinstance(event, ToolCall | ArgumentsDelta))
    assert called == ToolCall("f")
    assert joined(arguments).count("a") == 36
    assert (fold(events).calls, fold(events).num_unended_calls) == ((), 1)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_half_a_surrogate_pair_in_arguments_can_be_sent(name: str) -> None:
    text = WRITERS[name]("", [("f", {"y": ["HALF"]})]).replace("HALF", "\\ud83d")

    found = read(Parsing(name), text)

    assert found.content or found.calls
    assert "".join((found.content, *(call.arguments for call in found.calls))).encode()


CUT_CALLS = [("f", {"x": "a<b", "n": 2}), ("g", {})]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_is_cut_anywhere_is_no_call(name: str) -> None:
    text = WRITERS[name]("", CUT_CALLS)

    for end in range(len(text) + 1):
        for is_cut_off in (False, True):
            whole = fold(events_of(Parsing(name), [text[:end]], is_cut_off=is_cut_off))
            pieces = fold(events_of(Parsing(name), list(text[:end]), is_cut_off=is_cut_off))

            assert whole == pieces
            found = [(call.name, json.loads(call.arguments)) for call in whole.calls]
            assert found == CUT_CALLS[: len(found)], text[:end]


def test_only_the_end_of_the_model_ends_an_argument_without_its_tag() -> None:
    """Models of GLM leave out the tag, and a text can have the one after it."""
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>a</tool_call>"

    ended, cut = (
        fold(events_of(Parsing("glm45"), [text], is_cut_off=is_cut_off)).calls
        for is_cut_off in (False, True)
    )

    assert (ended, cut) == ((ToolCall("f", '{"x": "a"}'),), ())


def test_a_long_text_argument_is_streamed_as_it_arrives() -> None:
    begun = "<tool_call><function=f><parameter=x>\none\ntwo"

    called, *events = events_of(Parsing("qwen3_xml"), [begun, ' "three"'], is_cut_off=True)

    arguments = [event for event in events if isinstance(event, ArgumentsDelta)]
    assert called == ToolCall("f")
    assert joined(arguments) == '{"x": "one\\ntwo \\"three\\"'
    assert len(arguments) >= 4


@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"$ref": "#/$defs/size"}, "12", 12),
        ({"enum": ["12", "13"]}, "12", "12"),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "number"}, "1e999", 10**999),
        ({"type": "number"}, f"1e{'9' * 20}", f"1e{'9' * 20}"),  # beyond decimals
        ({"type": "array"}, "[1, 2.5, -1e400]", [1, 2.5, -(10**400)]),
        ({"type": "array"}, "[1e4000]", "[1e4000]"),
        ({"type": "array"}, "[1e3000, 1e3000]", "[1e3000, 1e3000]"),  # 6,000 digits
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "array"}, r'["\ud83d"]', r'["\ud83d"]'),
        ({"type": "array"}, r"['\ud83d']", r"['\ud83d']"),
        ({"type": "array"}, r'["\ud83d\ude00"]', ["😀"]),
        ({}, r'"\ud83d"', r'"\ud83d"'),
        ({}, "[1, 2", "[1, 2"),
        ({}, "[1, 2]", [1, 2]),
    ],
)
def test_texts_become_the_types_of_the_schema(
    schema: dict[str, object], written: str, expected: object
) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"size": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = TextFormat(Parsing("glm45"), ToolCallMode.BY_MODEL, tools=tools).parser()
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>"

    [call] = fold([*parser.push(text), *parser.finish()]).calls

    assert json.loads(call.arguments) == {"x": expected}


@pytest.mark.parametrize("keyword", ["type", "anyOf", "$ref", "enum", "properties"])
@pytest.mark.parametrize("value", [5, True, ["x", 5], [["x"]], {"a": 5}, [{"type": [{}]}]])
def test_a_schema_with_values_of_wrong_types_ends_no_answer(keyword: str, value: object) -> None:
    for parameters in ({keyword: value}, {"properties": {"x": {keyword: value}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        parser = TextFormat(Parsing("glm45"), ToolCallMode.BY_MODEL, tools=tools).parser()
        text = "<tool_call>f<arg_key>x</arg_key><arg_value>12</arg_value></tool_call>"

        [call] = fold([*parser.push(text), *parser.finish()]).calls

        assert json.loads(call.arguments)["x"] in (12, "12")


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", AnswerText("b", "a")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", AnswerText("a</think>b")),
        ("<think>\nold\n</think>\n\nold<|im_end|>\n<|im_start|>assistant\n", None),
    ],
)
def test_the_prompt_shows_whether_an_answer_begins_inside_the_reasoning(
    prompt_end: str, expected: AnswerText | None
) -> None:
    found = read(Parsing("hermes", "qwen3"), "a</think>b", prompt_end=prompt_end)

    assert found == (expected or AnswerText("a</think>b"))


def test_a_call_ends_a_reasoning_that_lacks_its_end_mark() -> None:
    text = "why <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    text += "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"

    found = read(Parsing("kimi_k2", "kimi_k2"), text, prompt_end="<think>")

    assert found == AnswerText("", "why ", (ToolCall("f", "{}"),))


@pytest.mark.parametrize("prompt_end", ["", "<|CHATBOT_TOKEN|><|START_THINKING|>"])
def test_command_separates_reasoning_and_text_also_without_tools(prompt_end: str) -> None:
    begin = "" if prompt_end else "<|START_THINKING|>"
    text = f"{begin}why<|END_THINKING|><|START_RESPONSE|>so<|END_RESPONSE|>"
    parser = TextFormat(Parsing("cohere_cmd", "cohere_cmd")).parser(prompt_end)

    assert fold([*parser.push(text), *parser.finish()]) == AnswerText("so", "why")


def test_harmony_separates_channels_also_without_tools() -> None:
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>so"
    parser = TextFormat(Parsing("openai", "openai_gptoss")).parser("<|start|>assistant")

    assert fold([*parser.push(text), *parser.finish()]) == AnswerText("so", "why")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", Parsing()),
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", Parsing()),
        (
            '<tool_call>\\n{"name": <function-name>}\\n</tool_call>',
            Parsing("hermes"),
        ),
        ("<tool_call></tool_call> <think></think>", Parsing("hermes", "qwen3")),
        ("<tool_call>\n<function=a>\n<parameter=b></tool_call>", Parsing("qwen3_xml")),
        ("<tool_call>{name}<arg_key></tool_call><think>", Parsing("glm45", "glm45")),
        ("<|start_header_id|> {%- if tools %} <|python_tag|>", Parsing("llama3_json")),
        ("<|header_start|> {%- if tools %}", Parsing("llama4_json")),
        ("<|header_start|> [func_name1(params_name1=", Parsing("llama4_pythonic")),
        ("[INST] [TOOL_CALLS] [AVAILABLE_TOOLS]", Parsing("mistral")),
        ("[INST] [TOOL_CALLS] [THINK]", Parsing("mistral", "mistral")),
        (
            "<｜Assistant｜><｜tool▁calls▁begin｜>```json</think>",
            Parsing("deepseek_v3", "deepseek_v3"),
        ),
        (
            "<｜Assistant｜><think>\\n<｜tool▁calls▁begin｜>```json</think>",
            Parsing("deepseek_v3", "deepseek_r1"),
        ),
        (
            "<｜Assistant｜><｜tool▁calls▁begin｜></think>",
            Parsing("deepseek_v31", "deepseek_v3"),
        ),
        ("<|tool_calls_section_begin|>", Parsing("kimi_k2")),
        ("<|im_start|>List of tools: <|tool_list_start|>[", Parsing("lfm2")),
        ("<|im_start|>List of tools: [ </think>", Parsing("lfm2")),
        ("<tool></tool><minimax:tool_call></think><think>", Parsing("minimax_m2", "minimax_m2")),
        ("<|START_ACTION|>[<|END_ACTION|><|START_RESPONSE|>", Parsing("cohere_cmd", "cohere_cmd")),
        ("<|start|>assistant<|channel|>analysis", Parsing("openai", "openai_gptoss")),
        ("<|tool_call>call:<tool_call|><|channel>thought", Parsing("gemma4", "gemma4")),
        (
            "<|start_of_role|>assistant_tool_call Here is my thought process:",
            Parsing("granite", "granite"),
        ),
        ("<think></think><TOOLCALL>[]</TOOLCALL>", Parsing("nemotron_json", "qwen3")),
        ("<|tool|>{{ tools }}<|/tool|>", Parsing("phi4_mini_json")),
    ],
)
def test_formats_are_chosen_by_the_chat_template(template: str, expected: Parsing) -> None:
    assert parsing_of_template(template) == expected


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_call_of_too_many_values_is_text(name: str) -> None:
    """These calls are translated as a whole, in one turn of the event loop."""
    few, many = (WRITERS[name]("", [("f", {"a": [1] * number})]) for number in (2000, 5000))

    assert len(read(Parsing(name), few).calls) == 1
    assert read(Parsing(name), many) == AnswerText(many)
