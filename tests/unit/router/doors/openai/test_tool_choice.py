"""Forced tool calls: their constraint on the answer, and the calls parsed from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingDefaults
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.llguidance_backend import GrammarLibrary, validate_grammar
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    ParsedRequest,
    chat_completion_from,
)
from baton.router.doors.openai.request.structured_outputs import errors_of_field
from baton.router.text_events.events import ArgumentsDelta, CallEnd, ToolCall, fold
from baton.router.text_events.parsing import (
    Constraint,
    NamedCallParser,
    RequiredCallsParser,
    TextFormat,
    ToolCallMode,
)
from baton.router.text_events.table import REASONING_FORMATS
from baton.router.values import ChatPrompt, Parsing, ReasoningTokens
from tests.support.grammars import is_whole
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, save_tokenizer

HERMES = Parsing("hermes")
CONTEXT = ModelContext(SamplingDefaults(), max_model_len=512)
TREE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "http://example.com/tree",
    "type": "object",
    "definitions": {
        "$ref": {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        "const": {"enum": [{"$ref": "#"}]},
    },
    "properties": {
        "below": {"$ref": "#"},
        "numbers": {"$ref": "#/definitions/$ref"},
        "same": {"$ref": "#/definitions/const"},
    },
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **described}}


TOOLS = [function("tree", TREE), function("look", LOOK), function("now")]


def requested(**fields: Any) -> ParsedRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return chat_completion_from(body, "id", CONTEXT)


def form(**fields: Any) -> StructuredOutputs:
    found = requested(**fields).calls[0].sampling.structured_outputs
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return path


CALL = '{"name": "look", "arguments": {"at": "it"}}'


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [
                f"[{CALL}]",
                f"[{CALL}, {CALL}]",
                '[{"name":"now","arguments":{}}]',
                '[{"name":"tree","arguments":{"below":{"numbers":[1],"same":{"$ref":"#"}}}}]',
            ],
            [
                "[]",
                CALL,
                '[{"name": "look", "arguments": {}}]',
                '[{"name": "other", "arguments": {"at": "it"}}]',
                '[{"name": "look", "arguments": {"at": "it", "age": "30"}}]',
                '[{"name": "now", "arguments": 1}]',
                '[{"name":"now","arguments":{"any":[1]}}]',
                '[{"name":"tree","arguments":{"below":{"name":"now"}}}]',
                '[{"name":"tree","arguments":{"numbers":[1,2]}}]',
            ],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [f"[{CALL}]"],
            [f"[{CALL}, {CALL}]"],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            ['{"at": "it"}'],
            ["{}", '{"at": "it", "age": "30"}', CALL, f"[{CALL}]"],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
            ["{}"],
            ['{"any": 1}', "[]"],
        ),
    ],
)
def test_forced_calls_follow_the_schema_of_their_parameters(
    fields: dict[str, Any], good: list[str], bad: list[str], folder: Path
) -> None:
    tokenizer = load_tokenizer(folder)
    grammar = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,)).compile(
        form(**fields)
    )

    assert [text for text in good if not is_whole(grammar, tokenizer, text)] == []
    assert [text for text in bad if is_whole(grammar, tokenizer, text)] == []


def test_tools_are_rendered_for_the_model_as_given() -> None:
    [call] = requested(tool_choice="required").calls
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.variables == {"tools": TOOLS}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": []}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [function("f", [1])]}, "tools.0.function.parameters"),
        ({"tools": [function("f"), function("f")]}, "tools"),
        ({"tools": [function("f", {"title": "x" * (1 << 21)})]}, "tools"),
    ],
)
def test_unenforceable_tool_calls_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        requested(**{"tool_choice": "required", **fields})

    assert refusal.value.field == field


REGEX = "(?=a)"


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        (
            {"tools": [function("f", {"not": {}})], "tool_choice": "required"},
            "tools",
            "the form made of the tools' parameters cannot be enforced: no value matches it",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "response_format cannot be enforced: no value matches it: schema is false",
        ),
        ({"guided_regex": REGEX}, "guided_regex", "guided_regex cannot be enforced: "),
        (
            {"structured_outputs": {"regex": REGEX}},
            "structured_outputs",
            "structured_outputs.regex cannot be enforced: ",
        ),
    ],
)
def test_an_unenforceable_constraint_is_an_error_of_the_sent_field(
    fields: dict[str, Any], field: str, reason: str
) -> None:
    parsed = requested(**fields)
    wanted = parsed.calls[0].sampling.structured_outputs
    assert wanted is not None

    with pytest.raises(InvalidRequest) as refusal, errors_of_field(parsed.options.form_field):
        validate_grammar(wanted)

    assert str(refusal.value).startswith(reason)
    assert refusal.value.field == field


def test_tool_calls_are_streamed_while_they_are_generated() -> None:
    parser = RequiredCallsParser()
    chunks = ["[{", '"name": "look", "argu', 'ments": {"at": "i', 't"}}, ', '{"name": "now", ']

    events = [parser.push(chunk) for chunk in [*chunks, '"arguments":{}}', "]"]]

    assert events == [
        [],
        [],
        [ToolCall("look"), ArgumentsDelta('{"at": "i')],
        [ArgumentsDelta('t"}'), CallEnd()],
        [],
        [ToolCall("now"), ArgumentsDelta("{}"), CallEnd()],
        [],
    ]
    assert parser.finish() == []


def test_the_arguments_of_a_named_function_are_the_answer() -> None:
    parser = NamedCallParser("look")

    events = [parser.push(chunk) for chunk in ("", '{"at":', ' "it"}\n', "\n")]

    assert events[:2] == [[], [ToolCall("look", '{"at":')]]
    assert events[2:] == [[ArgumentsDelta(' "it"}'), CallEnd()], []]
    assert parser.finish() == []


def test_with_parallel_tool_calls_false_only_the_first_call_is_returned() -> None:
    parser = TextFormat(Parsing(tools="hermes"), ToolCallMode.BY_MODEL, has_one_call=True).parser()

    parts = [parser.push(f"<tool_call>{CALL}</tool_call>") for _ in range(2)]

    assert [len(fold(events).calls) for events in parts] == [1, 0]


def test_a_broken_call_does_not_take_the_place_of_the_only_one() -> None:
    parser = TextFormat(Parsing(tools="hermes"), ToolCallMode.BY_MODEL, has_one_call=True).parser()
    broken = CALL.replace('"it"', "NaN")

    events = [
        event
        for call in (broken, CALL, CALL)
        for event in parser.push(f"<tool_call>{call}</tool_call>")
    ]

    assert (len(fold(events).calls), fold(events).num_unended_calls) == (1, 1)


def strict_format(
    parser: Parsing = HERMES, other: str = "g", **fields: Any
) -> tuple[TextFormat, StructuredOutputs | None]:
    tools = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": LOOK}},
        {"type": "function", "function": {"name": other, "parameters": LOOK}},
    ]
    context = ModelContext(SamplingDefaults(), 100, parser)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    parsed = chat_completion_from(body, "id", context)
    return parsed.options.text_format, parsed.calls[0].sampling.structured_outputs


def test_strict_tools_constrain_the_calls_that_the_model_decides_about() -> None:
    text_format, form = strict_format()

    assert form is not None
    assert form.structural_tag is not None
    tag = json.loads(form.structural_tag)
    assert [each["trigger"] for each in tag["sections"]] == ["<tool_call>"]
    assert [each.get("additionalProperties") for each in tag["schemas"]] == [False, None]
    assert "<tool_call>" in text_format.marks  # calls are parsed as usual


def test_strict_calls_are_not_constrained_next_to_an_output_format() -> None:
    _, form = strict_format(response_format={"type": "json_object"})
    assert form == StructuredOutputs(json_object=True)


def test_the_constraint_of_strict_calls_begins_after_reasoning_in_marks_of_its_own() -> None:
    """Calls of gpt-oss can be among its reasoning."""
    found = []
    for tools, reasoning in (("hermes", "qwen3"), ("openai", "openai_gptoss")):
        tokens = ReasoningTokens(REASONING_FORMATS[reasoning], 5, (6,))
        text_format, _ = strict_format(parser=Parsing(tools, reasoning, tokens))
        found.append(text_format.reasoning_tokens)
        plain = replace(text_format, constraint=Constraint.ANSWER)
        assert plain.reasoning_tokens == tokens
    assert found[0] is not None
    assert found[1] is None


def test_a_name_that_a_format_cannot_write_is_refused() -> None:
    message = "tools.1.function.name is 'g-h', which calls of the format pythonic cannot have"
    with pytest.raises(InvalidRequest, match=message) as refused:
        strict_format(parser=Parsing("pythonic"), other="g-h")
    assert refused.value.field == "tools.1.function.name"
