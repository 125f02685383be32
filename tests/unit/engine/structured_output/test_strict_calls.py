"""Calls of strict tools in the formats of models: what the grammar of each allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.llguidance_backend import CompiledGrammar, GrammarLibrary
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.strict_calls import STRICT_CALLS
from baton.router.text_events.table import TOOL_FORMATS
from baton.router.values import Parsing
from tests.support.grammars import is_whole
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.written_calls import WRITERS, Call

VOCAB_SIZE = 512
SEE: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grey"]}, "age": {"type": "integer"}},
    "required": ["colour", "age"],
    "additionalProperties": False,
}
FUNCTIONS = (("see", SEE), ("feed", {"type": "object"}))
RED: Call = ("see", {"colour": "red", "age": 3})
FEED: Call = ("feed", {"any": ["thing"]})
WRONG: tuple[Call, ...] = (
    ("see", {"colour": "blue", "age": 3}),
    ("see", {"colour": "red"}),
    ("see", {"colour": "red", "age": 3, "more": 1}),
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
    marks = {mark for name in STRICT_CALLS for mark in TOOL_FORMATS[name].marks if mark[0] in "<["}
    marks |= {"<｜tool▁sep｜>", "<｜tool▁call▁end｜>"}
    return load(tmp_path_factory.mktemp("tokens"), *sorted(marks))


@pytest.mark.parametrize("kind", ["marks_are_text", "marks_are_tokens"])
@pytest.mark.parametrize("name", STRICT_CALLS)
def test_calls_follow_the_schema_of_their_tool(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer, library = request.getfixturevalue(kind)
    tag = {"sections": [each.section(FUNCTIONS) for each in STRICT_CALLS[name]]}
    grammar: CompiledGrammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    write = WRITERS[name]
    before = "I look. " if write.has_text_before else ""

    def accepts(text: str) -> bool:
        return is_whole(grammar, tokenizer, text, VOCAB_SIZE)

    good = ["", "plain text {", write(before, [RED]), write(before, [FEED, RED])]
    good += OTHER_CALLS.get(name, ())
    assert [text for text in good if not accepts(text)] == []
    bad = [write(before, [call]) for call in WRONG]
    bad += [write(before, [RED, call]) for call in WRONG]
    bad.append(write(before, [RED])[:-3])  # cut off
    assert [text for text in bad if accepts(text)] == []
    for text in OTHER_CALLS.get(name, ()):
        assert not accepts(text.replace("red", "blue"))


@pytest.mark.parametrize("name", STRICT_CALLS)
def test_what_the_grammar_allows_is_read_as_calls(name: str) -> None:
    tools = [{"type": "function", "function": {"name": each}} for each, _ in FUNCTIONS]
    text_format = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=tools)
    for text in OTHER_CALLS.get(name, ()):
        parser = text_format.parser()
        events = [*parser.push(text), *parser.finish()]
        assert [(each.name, json.loads(each.arguments)) for each in events] == [RED]  # type: ignore[union-attr]
