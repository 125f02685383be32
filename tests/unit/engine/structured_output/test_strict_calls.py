"""Calls of strict tools in the formats of models: what the grammar of each allows."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar import Grammar
from baton.engine.structured_output.llguidance_backend import (
    GrammarLibrary,
    validate_grammar,
)
from baton.router.text_events.events import fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.strict_calls import STRICT_CALLS
from baton.router.text_events.table import TOOL_FORMATS
from baton.router.values import Parsing
from tests.support.grammars import allowed_by, is_whole
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.schemas import is_valid
from tests.support.written_calls import WRITERS, Call

VOCAB_SIZE = 512
# Marks that are special tokens of some tokenizers; Qwen's tags of parameters are not.
TOKEN = re.compile(r"<(?!/?(function|parameter)).+>|\[.+\]")
SEE: Any = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grey"]},
        "age": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["colour", "age"],
    "additionalProperties": False,
}
FUNCTIONS = (("see", SEE), ("feed", {"type": "object"}))
RED: Call = ("see", {"colour": "red", "age": 3})
FULL: Call = ("see", {"colour": "grey", "age": 1, "note": "a <b> {c}\nd", "at": [True, False]})
FEED: Call = ("feed", {"any": ["thing"]})
WRONG: tuple[Call, ...] = (
    ("see", {"colour": "blue", "age": 3}),
    ("see", {"colour": "red"}),
    ("see", {"colour": "red", "age": 3, "more": 1}),
    ("see", {"colour": "red", "age": 3, "at": ["x"]}),
    ("other", {}),
)
OTHER_CALLS = {
    "mistral": (
        '[TOOL_CALLS]see[CALL_ID]abcdef123[ARGS]{"colour": "red", "age": 3}',
        '[TOOL_CALLS][{"name": "see", "arguments": {"colour": "red", "age": 3}}]',
    ),
    "granite": ('<tool_call>[{"name": "see", "arguments": {"colour": "red", "age": 3}}]',),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "see", "arguments": {"colour": "red", "age": 3}}]<|/tool_call|>',
    ),
}


def load(folder: Path, *specials: str) -> tuple[Tokenizer, GrammarLibrary]:
    save_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = TokenizerFile.from_file(path)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    tokenizer.save(path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))
    return load_tokenizer(folder), library


@pytest.fixture(scope="module")
def marks_are_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, GrammarLibrary]:
    return load(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def marks_are_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, GrammarLibrary]:
    formats = [TOOL_FORMATS[name] for name in STRICT_CALLS]
    marks = {mark for each in formats for mark in each.marks if TOKEN.fullmatch(mark)}
    marks |= {"<｜tool▁sep｜>", "<｜tool▁call▁end｜>"}
    return load(tmp_path_factory.mktemp("tokens"), *sorted(marks))


@pytest.mark.parametrize("kind", ["marks_are_text", "marks_are_tokens"])
@pytest.mark.parametrize("name", STRICT_CALLS)
def test_calls_follow_the_schema_of_their_tool(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer, library = request.getfixturevalue(kind)
    tag = {"sections": [each.section(FUNCTIONS) for each in STRICT_CALLS[name]]}
    grammar: Grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    write = WRITERS[name]
    before = "I look. " if write.has_text_before else ""

    def accepts(text: str) -> bool:
        return is_whole(grammar, tokenizer, text, VOCAB_SIZE)

    good = ["", "plain text {", write(before, [RED]), write(before, [FEED, RED])]
    good.append(write(before, [FULL]))
    good += OTHER_CALLS.get(name, ())
    assert [text for text in good if not accepts(text)] == []
    bad = [write(before, [call]) for call in WRONG]
    bad += [write(before, [RED, call]) for call in WRONG]
    bad.append(write(before, [RED])[:-3])  # cut off
    assert [text for text in bad if accepts(text)] == []
    for text in OTHER_CALLS.get(name, ()):
        assert not accepts(text.replace("red", "blue"))


@pytest.mark.parametrize("name", STRICT_CALLS)
def test_random_calls_are_read_as_the_schema_says(
    name: str, marks_are_text: tuple[Tokenizer, GrammarLibrary]
) -> None:
    tokenizer, library = marks_are_text
    properties = {key: value for key, value in SEE["properties"].items() if key != "note"}
    schema = {**SEE, "properties": {**properties, "age": {"enum": [1, 22, None]}}}
    tools = [{"type": "function", "function": {"name": "see", "parameters": schema}}]
    text_format = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=tools)
    for seed, notation in enumerate(STRICT_CALLS[name] * 3):
        tag = {"sections": [notation.section([("see", schema)])]}
        grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
        text = random_answer(grammar, tokenizer, notation.trigger or "{", random.Random(seed))
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
    tag = {"sections": [STRICT_CALLS["qwen3_xml"][0].section([("f", schema)])]}

    with pytest.raises(InvalidRequest, match=f"'x' stands between tags, so .*{reason}"):
        validate_grammar(StructuredOutputs(structural_tag=json.dumps(tag)))


@pytest.mark.parametrize("text", ["a\n</parameter>\nb", "a\n<parameter=x", "a\n</function>\n"])
def test_texts_cannot_end_their_argument_elsewhere(
    text: str, marks_are_text: tuple[Tokenizer, GrammarLibrary]
) -> None:
    tokenizer, library = marks_are_text
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    tag = {"sections": [STRICT_CALLS["qwen3_xml"][0].section([("f", schema)])]}
    grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    write = WRITERS["qwen3_xml"]

    assert is_whole(grammar, tokenizer, write("", [("f", {"x": "a\n</b>"})]), VOCAB_SIZE)
    assert not is_whole(grammar, tokenizer, write("", [("f", {"x": text})]), VOCAB_SIZE)
