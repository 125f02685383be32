"""Calls of strict tools in the formats of models: what the grammar of each allows."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar import Grammar
from baton.engine.structured_output.llguidance_backend import GrammarLibrary, validate_grammar
from baton.engine.structured_output.tags.tag_grammar import FORMS
from baton.router.text_events.events import fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.strict_formats import STRICT_FORMATS
from baton.router.text_events.table import TOOL_FORMATS
from baton.router.values import Parsing
from tests.support.grammars import allowed_by, is_whole
from tests.support.models import EOS_TOKEN_ID
from tests.support.other_calls import HIDDEN, OTHER_CALLS, PLAIN
from tests.support.schemas import is_valid
from tests.support.strict_tools import FEED, FULL, FUNCTIONS, RED, SEE, VOCAB_SIZE
from tests.support.written_calls import WRITERS, Call

BEGINS = {  # of whole answers
    "llama3_json": "{",
    "llama4_json": "{",
    "openai": " to=functions.see",
    "pythonic": "see(",
    "llama4_pythonic": "see(",
}
WRONG: tuple[Call, ...] = (
    ("see", {"colour": "blue", "age": 3}),
    ("see", {"colour": "red"}),
    ("see", {"colour": "red", "age": 3, "more": 1}),
    ("see", {"colour": "red", "age": "x"}),
    ("see", {"colour": "red", "age": 3, "at": ["x"]}),
    ("other", {}),
)


@pytest.mark.parametrize("kind", ["marks_are_text", "marks_are_tokens"])
@pytest.mark.parametrize("name", STRICT_FORMATS)
def test_calls_follow_the_schema_of_their_tool(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer, library = request.getfixturevalue(kind)
    tag = STRICT_FORMATS[name].structural_tag(FUNCTIONS)
    grammar: Grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    write = WRITERS[name]
    before = "I look. " if write.has_text_before else ""

    def accepts(text: str) -> bool:
        return is_whole(grammar, tokenizer, text, VOCAB_SIZE)

    good = ["", "plain text {", write(before, [RED]), write(before, [FEED, RED])]
    good += [write(before, [FULL]), *OTHER_CALLS.get(name, ()), *PLAIN.get(name, ())]
    assert [text for text in good if not accepts(text)] == []
    bad = [write(before, [call]) for call in WRONG]
    bad += [write(before, [RED, call]) for call in WRONG]
    red = write(before, [RED])
    bad += [red[: red.rindex("3")], *HIDDEN.get(name, ())]
    bad += [text.replace("red", "blue") for text in OTHER_CALLS.get(name, ())]
    assert [text for text in bad if accepts(text)] == []


def test_calls_of_all_formats_can_be_strict() -> None:
    assert STRICT_FORMATS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", STRICT_FORMATS)
def test_marks_that_are_spelled_out_begin_no_call(
    name: str, marks_are_tokens: tuple[Tokenizer, GrammarLibrary]
) -> None:
    """Parsers see only the text."""
    tokenizer, library = marks_are_tokens
    tag = STRICT_FORMATS[name].structural_tag(FUNCTIONS)
    grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    write = WRITERS[name]
    before = "I look. " if write.has_text_before else ""
    matcher = grammar.matcher()
    text = write(before, [("other", {"any": "thing"})])
    tokens = [token for each in text for token in tokenizer.encode(each, add_special_tokens=False)]

    assert not all(map(matcher.try_advance, tokens)) or EOS_TOKEN_ID not in allowed_by(
        matcher, VOCAB_SIZE
    )


@pytest.mark.parametrize("kind", ["marks_are_text", "marks_are_tokens"])
@pytest.mark.parametrize("name", STRICT_FORMATS)
def test_random_calls_are_read_as_the_schema_says(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer, library = request.getfixturevalue(kind)
    properties = {key: value for key, value in SEE["properties"].items() if key != "note"}
    schema = {**SEE, "properties": {**properties, "age": {"enum": [1, 22, None]}}}
    tools = [{"type": "function", "function": {"name": "see", "parameters": schema}}]
    text_format = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=tools)
    for seed, notation in enumerate([*STRICT_FORMATS[name].notations] * 2):
        tag = replace(STRICT_FORMATS[name], notations=(notation,)).structural_tag([("see", schema)])
        grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
        begin = notation.trigger or f"{notation.begin}{BEGINS[name]}"
        text = random_answer(grammar, tokenizer, begin, random.Random(seed))
        parser = text_format.parser()
        answer = fold([*parser.push(text), *parser.finish()])
        assert answer.calls, text
        assert all(is_valid(call.arguments, schema) for call in answer.calls), text


def random_answer(grammar: Grammar, tokenizer: Tokenizer, begin: str, chance: random.Random) -> str:
    """Return a random answer that begins so, and ends where it can."""
    tokens = tokenizer.encode(begin, add_special_tokens=False)
    matcher = grammar.matcher()
    matcher.advance(tokens)
    while EOS_TOKEN_ID not in (allowed := allowed_by(matcher, VOCAB_SIZE)):
        tokens.append(chance.choice(sorted(allowed)))
        matcher.advance(tokens[-1:])
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_all_notations_of_a_format_are_read(name: str) -> None:
    tools = [{"type": "function", "function": {"name": each}} for each, _ in FUNCTIONS]
    text_format = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=tools)
    for text in OTHER_CALLS[name]:
        parser = text_format.parser()
        [call] = fold([*parser.push(text), *parser.finish()]).calls
        assert (call.name, json.loads(call.arguments)) == RED


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "string", "pattern": "a"}, "a text cannot have pattern"),
        ({"type": ["string", "object"]}, "any text or an object"),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, "any text or one of some numbers"),
        ({"allOf": [{"type": "integer"}]}, "cannot combine"),
    ],
)
def test_texts_between_tags_are_not_constrained(part: Any, reason: str) -> None:
    schema = {"type": "object", "properties": {"x": part}}
    tag = STRICT_FORMATS["qwen3_xml"].structural_tag([("f", schema)])

    with pytest.raises(InvalidRequest, match=f"'x' stands between tags, so .*{reason}"):
        validate_grammar(StructuredOutputs(structural_tag=json.dumps(tag)))


@pytest.mark.parametrize("text", ["a\n</parameter>\nb", "a\n<parameter=x", "a\n</function>\n"])
def test_texts_cannot_end_their_argument_elsewhere(
    text: str, marks_are_text: tuple[Tokenizer, GrammarLibrary]
) -> None:
    tokenizer, library = marks_are_text
    part = {"type": "string", "maxLength": 39}
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"]}
    tag = STRICT_FORMATS["qwen3_xml"].structural_tag([("f", schema)])
    grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    write = WRITERS["qwen3_xml"]

    assert is_whole(grammar, tokenizer, write("", [("f", {"x": "a\n</b>"})]), VOCAB_SIZE)
    assert not is_whole(grammar, tokenizer, write("", [("f", {"x": "a" * 40})]), VOCAB_SIZE)
    assert not is_whole(grammar, tokenizer, write("", [("f", {"x": text})]), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ('name="x" string="false">"aa"', "aa"),
        ('name="x" string="false">"b"', None),
        ('name="x" string="true">aa', None),
        ('name="x" string="true">any', "any"),
        ('name="x" string="false">7', 7),
        ('name="x" string="true">7', None),
        ('name="q&amp;a" string="true">7', "7"),
        ('name="q&amp;a" string="false">{"y": 1}', {"y": 1}),
        ('name="q&amp;a" string="false">[]', None),
        ('name="short" string="true">é\n', "é\n"),
        ('name="short" string="true">abc', None),
        ('name="short" string="false">"ab"', None),
    ],
)
def test_tags_that_mark_json_enforce_the_whole_schema(
    argument: str, value: Any, marks_are_text: tuple[Tokenizer, GrammarLibrary]
) -> None:
    tokenizer, library = marks_are_text
    constrained = {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"enum": ["any", 7]}]}
    properties = {
        "x": constrained,
        "q&a": {"type": ["string", "object"]},
        "short": {"type": "string", "maxLength": 2},
    }
    tag = STRICT_FORMATS["deepseek_v32"].structural_tag([("f", {"properties": properties})])
    grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    text = (
        f'<｜DSML｜invoke name="f">\n<｜DSML｜parameter {argument}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>"
    )

    assert is_whole(grammar, tokenizer, text, VOCAB_SIZE) == (value is not None)
    if value is not None:
        parser = TextFormat(Parsing("deepseek_v32"), ToolCallMode.BY_MODEL).parser()
        [call] = fold([*parser.push(text), *parser.finish()]).calls
        assert list(json.loads(call.arguments).values()) == [value]


SECTION = {"trigger": "<", "structures": [{"begin": "f", "schema": True}]}


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({"sections": [SECTION], "more": 1}, "can have schemas and text"),
        ({"sections": [SECTION] * 5}, "1 to 4 sections"),
        ({"sections": [SECTION, {**SECTION, "literals": "python"}]}, "the same parameter or"),
        ({"sections": [{**SECTION, "structures": [{"begin": "f", "schema_index": 0}]}]}, "less"),
        ({"sections": [SECTION], "text": {"begins": "<"}}, "begins must be lists"),
        ({"sections": [SECTION], "text": {"marks": [""]}}, "marks must be texts"),
        ({"sections": [{**SECTION, "literals": "lua"}]}, "literals must be"),
        ({"sections": [{**SECTION, "literals": "python", "parameter": {}}]}, "both parameter and"),
        ({"sections": [{**SECTION, "parameter": {"begin": "<"}}]}, "parameter must have begin and"),
        (
            {"sections": [{**SECTION, "structures": [{"begin": "f", "text": True}]}]},
            "must have stops",
        ),
        (
            {"sections": [{**SECTION, "structures": [{"begin": [{"any": "x"}], "schema": {}}]}]},
            "begin and end of a structure must be texts",
        ),
    ],
)
def test_wrong_sections_are_refused_with_the_reason(tag: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(structural_tag=json.dumps(tag)))


VALUES: tuple[Any, ...] = (None, -1, 5.5, "x", [[]], {"x": 1})
ODD: tuple[Any, ...] = (
    *({keyword: value} for keyword in FORMS for value in VALUES),
    {"$ref": "#/$defs/nowhere"},
    {"type": "array", "items": {"$ref": "other.json#/x"}},
    {"anyOf": [{"$ref": "#/properties/x/anyOf/0"}]},
)


@pytest.mark.parametrize("name", ["pythonic", "functiongemma", "kimi_k3", "qwen3_xml"])
def test_odd_schemas_are_compiled_or_refused_by_name(
    name: str, marks_are_text: tuple[Tokenizer, GrammarLibrary]
) -> None:
    _, library = marks_are_text
    for part in ODD:
        schema = {"type": "object", "properties": {"x": part}}
        tag = STRICT_FORMATS[name].structural_tag([("f", schema)])
        with suppress(InvalidRequest):
            library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
