"""Answers with broken calls: what a grammar accepts is read as calls that follow the schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from baton.checkpoint.tokenizer import Tokenizer
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from baton.router.text_events.events import fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.strict_formats import STRICT_FORMATS
from baton.router.text_events.table import TOOL_FORMATS
from baton.router.values import Parsing
from tests.support.grammars import allowed_by
from tests.support.hypothesis_profiles import num_examples
from tests.support.models import EOS_TOKEN_ID
from tests.support.schemas import is_valid
from tests.support.strict_tools import FUNCTIONS, VOCAB_SIZE
from tests.support.written_calls import WRITERS, Call

NUM_ANSWERS = num_examples(200)
PIECES = (
    "\n",
    " ",
    "{",
    "[",
    "}",
    ")]",
    '"',
    "'",
    "assistant",
    "to=functions.see",
    "see(",
    "[other(a=1)]",
)
VALUES: tuple[Any, ...] = (
    "red",
    "x<b>",
    "",
    "it's",
    "a\nb",
    "3",
    3,
    -2,
    2.5,
    True,
    None,
    [True],
    {},
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FUNCTIONS
]


@pytest.mark.parametrize("kind", ["marks_are_text", "marks_are_tokens"])
@pytest.mark.parametrize("name", STRICT_FORMATS)
def test_what_is_accepted_is_read_as_calls_that_follow_the_schema(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    found: tuple[Tokenizer, GrammarLibrary] = request.getfixturevalue(kind)
    tokenizer, library = found
    tag = STRICT_FORMATS[name].structural_tag(FUNCTIONS)
    grammar = library.compile(StructuredOutputs(structural_tag=json.dumps(tag)))
    schemas: dict[str, Any] = dict(FUNCTIONS)
    text_format = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=TOOLS)
    for seed in range(NUM_ANSWERS):
        chance = random.Random(f"{name} {kind} {seed}")
        text = mutated(chance, name)
        matcher = grammar.matcher()
        is_accepted = all(map(matcher.try_advance, tokens_of(chance, tokenizer, text)))
        if is_accepted and EOS_TOKEN_ID in allowed_by(matcher, VOCAB_SIZE):
            parser = text_format.parser()
            calls = fold([*parser.push(text), *parser.finish()]).calls
            wrong = [each for each in calls if not follows(each.name, each.arguments, schemas)]
            assert not wrong, (text, wrong)


def follows(name: str, arguments: str, schemas: dict[str, Any]) -> bool:
    return name in schemas and is_valid(arguments, schemas[name])


def mutated(chance: random.Random, name: str) -> str:
    """Return an answer with calls, parts of which are left out, repeated or inserted."""
    write = WRITERS[name]
    text = write(chance.choice(["", "hi "]), [a_call(chance) for _ in range(chance.choice([1, 2]))])
    for _ in range(chance.randint(0, 3)):
        begin = chance.randint(0, len(text))
        end = begin + chance.choice([1, 2, 5, 20])
        elsewhere = chance.randint(0, len(text))
        piece = chance.choice([*PIECES, *filter(None, TOOL_FORMATS[name].marks)])
        text = chance.choice(
            [
                text[:begin] + text[end:],
                text[:begin] + piece + text[begin:],
                text[:elsewhere] + text[begin:end] + text[elsewhere:],
                text + write("", [a_call(chance)]),
            ]
        )
    return text


def a_call(chance: random.Random) -> Call:
    arguments = {"colour": "red", "age": 3, "note": "hi", "at": [True], "more": 1}
    given = {
        key: chance.choice(VALUES) if chance.random() < 0.2 else value
        for key, value in arguments.items()
        if chance.random() < (0.85 if key in ("colour", "age") else 0.3)
    }
    return chance.choice(["see", "see", "feed", "other"]), given


def tokens_of(chance: random.Random, tokenizer: Tokenizer, text: str) -> list[int]:
    """Return tokens of a text, in half of all cases with marks that are spelled out."""
    size = len(text) if chance.random() < 0.5 else chance.randint(1, 4)
    parts = (text[begin : begin + size] for begin in range(0, len(text), max(size, 1)))
    return [token for part in parts for token in encoded(tokenizer, part)]


@cache
def encoded(tokenizer: Tokenizer, part: str) -> list[int]:
    """Return the tokens of a part. Most parts have a few characters and recur."""
    return tokenizer.encode(part, add_special_tokens=False)
