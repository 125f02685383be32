"""Arguments in other notations than JSON: Python's literals and Gemma's values."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar import Grammar
from baton.engine.structured_output.llguidance_backend import GrammarLibrary, validate_grammar
from baton.router.text_events.events import fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.strict_formats import STRICT_FORMATS
from baton.router.values import Parsing
from tests.support.grammars import allowed_by, is_whole
from tests.support.hypothesis_profiles import num_examples
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, save_tokenizer
from tests.support.schemas import Schema, is_valid

NUM_SCHEMAS = num_examples(40)
MAX_TOKENS = 600
BEGINS = {"pythonic": "[f(", "functiongemma": "<start_function_call>call:f{"}
ENDS = {"pythonic": ")]", "functiongemma": "}<end_function_call>"}
CLOSING = set("\"'}])<,/")  # first characters of what ends a text or a list
WORDS = ["a", "b c", "it's", 'say "x"', "", 1, 2.5, True, None, [1, "x"], {"k": [False]}]


class Setting:
    def __init__(self, folder: Path) -> None:
        save_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))
        self.texts = [self.tokenizer.decode([token]) for token in range(VOCAB_SIZE)]

    def grammar(self, name: str, schema: Schema) -> Grammar:
        return self.library.compile(constraint(name, schema))

    def accepts(self, name: str, schema: Schema, arguments: str) -> bool:
        text = f"{BEGINS[name]}{arguments}{ENDS[name]}"
        return is_whole(self.grammar(name, schema), self.tokenizer, text)


def constraint(name: str, schema: Schema) -> StructuredOutputs:
    tag = STRICT_FORMATS[name].structural_tag([("f", schema)])
    return StructuredOutputs(structural_tag=json.dumps(tag))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("tokenizer"))


def an_object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(["a", "b", "ab", "key_c"], chance.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: a_schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": chance.choice([False, False, {"type": "integer"}]),
    }


def a_schema(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    flat: list[Schema] = [
        {"type": "string"},
        {"type": "string", "minLength": least, "maxLength": 4},
        {"type": "integer"},
        {"type": "number", "exclusiveMaximum": least},
        {"type": chance.sample(["null", "boolean", "string", "number"], 2)},
        {"enum": chance.sample(WORDS, 3)},
    ]
    if depth <= 0:
        return chance.choice(flat)
    inner = a_schema(chance, depth - 1)
    deep: list[Schema] = [
        {},
        {"type": "array", "items": inner, "minItems": least, "maxItems": 2},
        {"anyOf": [inner, {"type": "null"}]},
        an_object(chance, depth),
    ]
    return chance.choice([*flat, *deep, *deep])


@pytest.mark.parametrize("name", BEGINS)
def test_random_arguments_follow_random_schemas(name: str, setting: Setting) -> None:
    num_read = 0
    for seed in range(NUM_SCHEMAS):
        chance = random.Random(seed)
        schema = an_object(chance, 2)
        text = random_answer(setting, setting.grammar(name, schema), name, chance)
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        parser = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=tools).parser()
        if text:
            calls = fold([*parser.push(text), *parser.finish()]).calls
            assert calls, text
            assert all(is_valid(call.arguments, schema) for call in calls), (text, schema)
            num_read += 1
    assert num_read > NUM_SCHEMAS / 2


def random_answer(setting: Setting, grammar: Grammar, name: str, chance: random.Random) -> str:
    """Return an answer that is a call; empty if a text in it did not end."""
    tokens = setting.tokenizer.encode(BEGINS[name], add_special_tokens=False)
    matcher = grammar.matcher()
    matcher.advance(tokens)
    while EOS_TOKEN_ID not in (allowed := allowed_by(matcher)):
        closing = [each for each in sorted(allowed) if setting.texts[each][:1] in CLOSING]
        is_closing = closing and chance.random() < 0.3
        tokens.append(chance.choice(closing if is_closing else sorted(allowed)))
        matcher.advance(tokens[-1:])
        if len(tokens) > MAX_TOKENS:
            return ""
    return setting.tokenizer.decode(tokens, skip_special_tokens=False)


LINK: Schema = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/next"}},
    "required": ["value"],
    "additionalProperties": False,
}
ROOT: Schema = {
    "type": "object",
    "properties": {
        "link": {"$ref": "#/$defs/link"},
        "one": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "boolean"}]},
        "a key": {"const": "x y"},
        "any": True,
    },
    "$defs": {"link": LINK, "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}},
    "additionalProperties": False,
}
GOOD = {
    "pythonic": [
        "",
        "link={'value': 1, \"next\":{'value': -2, 'next': None}}",
        "one=True, any=[1, {'a': \"b\\'c\", 'd': [null, 2e5]}]",
        "one='ab'",
        'one="\\u00e9\\n"',
    ],
    "functiongemma": [
        "",
        "link:{value:1,next:{value:-2,next:null}}",
        "one:true,a key:<escape>x y<escape>,any:[1,{a:<escape>b'c\"}]<escape>,d:[null,2e5]}]",
        "one:<escape>ab<escape>",
    ],
}
BAD = {
    "pythonic": [
        "one=True, one=False",
        "any=1, one=True",
        "1",
        "link={'value': '1'}",
        "link={'value': 1.5}",
        "link={'next': None}",
        "link={'value': 1, 'value': 2}",
        "link={'value': 1, 'next': []}",
        "one='abc'",
        "one='a'c'",
        'one="\\ud800"',
        "any=1e999",
        "**{}",
        "more=1",
    ],
    "functiongemma": [
        "link:{value:<escape>1<escape>}",
        "link:{next:null}",
        "link:{value:1,value:2}",
        "one:abc",
        "one:<escape>abc<escape>",
        "a key:<escape>x<escape>",
        "more:1",
        "any:<escape>a<escape>b<escape>",
    ],
}


@pytest.mark.parametrize("name", BEGINS)
def test_values_follow_their_schema(name: str, setting: Setting) -> None:
    names = {key: part for key, part in ROOT["properties"].items() if key.isidentifier()}
    schema = ROOT if name == "functiongemma" else {**ROOT, "properties": names}

    assert [text for text in GOOD[name] if not setting.accepts(name, schema, text)] == []
    assert [text for text in BAD[name] if setting.accepts(name, schema, text)] == []


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("functiongemma", {"type": "string", "pattern": "a"}, "a text cannot have pattern"),
        ("functiongemma", {"const": "<escape>"}, "it cannot be '<escape>'"),
        ("pythonic", {"prefixItems": [True]}, "prefixItems cannot be enforced"),
        ("pythonic", {"type": "array", "minItems": 9999}, "at most 4096 items"),
        ("pythonic", {"allOf": [{"minimum": 1}, {"maximum": 2}]}, "cannot combine others"),
        ("pythonic", {"enum": [1], "minimum": 1}, "minimum cannot be next to constants"),
        ("pythonic", {"type": "integer", "minimum": 10**19}, "its minimum cannot be beyond"),
    ],
)
def test_what_a_notation_cannot_be_held_to_is_refused_by_name(
    name: str, part: Any, reason: str
) -> None:
    schema = {"type": "object", "properties": {"x": part}, "additionalProperties": False}

    with pytest.raises(InvalidRequest, match=f"'x' is written in .*'s notation, so .*{reason}"):
        validate_grammar(constraint(name, schema))


@pytest.mark.parametrize("name", ["from", "a b", "x-y", "ﬁ"])
def test_names_that_python_does_not_read_are_refused(name: str) -> None:
    schema = {"type": "object", "properties": {name: True}}

    with pytest.raises(InvalidRequest, match="is no name of an argument"):
        validate_grammar(constraint("pythonic", schema))
