"""llguidance backend with a real tokenizer: accepted, rejected and unsupported constraints."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import MAX_CHOICES, StructuredOutputs
from baton.engine.structured_output import llguidance_backend
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.compiler_errors import TemporaryRefusal
from baton.engine.structured_output.grammar import Grammar
from baton.engine.structured_output.llguidance_backend import (
    GrammarLibrary,
    validate_grammar,
)
from tests.support.grammars import PATIENCE_S, allowed_by, is_whole
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, save_tokenizer

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ENDLESS = {
    "$defs": {
        "n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    },
    "$ref": "#/$defs/n",
}
ENDLESS_LIST = {"type": "array", "minItems": 1, "items": {"$ref": "#"}}
LINKED = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return path


@pytest.fixture(scope="module")
def library(folder: Path) -> GrammarLibrary:
    return GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


CALLS = {
    "structures": [
        {"begin": "<call>f:", "schema": OBJECT, "end": "</call>"},
        {"begin": "<call>g:", "schema": {"type": "object"}},
    ],
    "triggers": ["<call>"],
}
FITTING: list[tuple[StructuredOutputs, list[str], list[str]]] = [
    (
        StructuredOutputs(structural_tag=json.dumps(CALLS)),
        [
            "",
            "no calls",
            'a <call>f:{"a": 1}</call> b <call>g:{"x": "y"}',
            '<call>f:{"a": 1}</call><call>f:{"a": 2}</call>',
        ],
        ["<call>", '<call>f:{"a": "x"}</call>', '<call>f:{"a": 1}', "<call>h:{}", "a <call> b"],
    ),
    (
        StructuredOutputs(json=json.dumps(OBJECT)),
        ['{"a":1}', '{ "a" : -12 }', '{\n  "a": 1\n}', f'{{\n{" " * 16}"a": 1}}'],
        ['{"a":"1"}', "{}", '{"a":1,"b":2}', '{"a":1} ', '{  "a":1}', f'{{\n{" " * 17}"a":1}}', ""],
    ),
    (
        StructuredOutputs(json=json.dumps(OBJECT), disable_any_whitespace=True),
        ['{"a":1}'],
        ['{"a": 1}', '{\n"a":1}'],
    ),
    (StructuredOutputs(json=json.dumps(LINKED)), ['{"n":{"n":null}}'], ['{"n":{"n":1}}']),
    (StructuredOutputs(json="true"), ["1", "[]", '"é"'], ["nope"]),
    (StructuredOutputs(json_object=True), ["{}", '{"b":[1,null]}'], ["[]", "1"]),
    (StructuredOutputs(regex="[a-c]{2,3}"), ["ab", "abc"], ["a", "abcd", "xx"]),
    (StructuredOutputs(regex=""), [""], ["a"]),
    (
        StructuredOutputs(choice=("yes", 'a "quoted"\\ one\n', "東京")),
        ["yes", 'a "quoted"\\ one\n', "東京"],
        ["ye", "yess", "no"],
    ),
    (StructuredOutputs(grammar='start: N ("+" N)*\nN: /[0-9]+/'), ["1", "1+23"], ["+", "1+"]),
    (StructuredOutputs(grammar='root ::= "a" root | "b"'), ["b", "aab"], ["a", "c"]),
    (StructuredOutputs(json='{"type": "number", "multipleOf": 0.25}'), ["0.75", "2"], ["0.7", "x"]),
    (StructuredOutputs(json='{"type": "integer", "multipleOf": 1000}'), ["0", "3000"], ["300"]),
    (StructuredOutputs(json='{"multipleOf": 9973}'), ["9973"], ["9974"]),
]


@pytest.mark.parametrize(("wanted", "good", "bad"), FITTING, ids=lambda one: str(one)[:40])
def test_a_grammar_accepts_exactly_its_language(
    wanted: StructuredOutputs,
    good: list[str],
    bad: list[str],
    library: GrammarLibrary,
    tokenizer: Tokenizer,
) -> None:
    grammar = library.compile(wanted)
    assert [text for text in good if not is_whole(grammar, tokenizer, text)] == []
    assert [text for text in bad if is_whole(grammar, tokenizer, text)] == []


PANICKED = "failed on it"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no json": ({"json": "{"}, "not JSON"),
    "nan": ({"json": '{"minimum": NaN}'}, "NaN is not JSON"),
    "a list": ({"json": "[1]"}, "a JSON schema is an object or a boolean; this is a list"),
    "a number": ({"json": "1"}, "this is int"),
    "no such type": ({"json": '{"type": "strnig"}'}, "strnig"),
    "type is a number": ({"json": '{"type": 5}'}, "type must be"),
    "properties is a list": ({"json": '{"properties": []}'}, "properties must be"),
    "what cannot be enforced": ({"json": '{"not": {"pattern": "a.b"}}'}, "not"),
    "told to be lenient": (
        {"json": '{"x-guidance": {"lenient": true}, "not": {"pattern": "a.b"}}'},
        "not is not supported",
    ),
    "false": ({"json": "false"}, "no value matches"),
    "contradiction": ({"json": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "minimum"),
    "from elsewhere": ({"json": '{"$ref": "http://example.com/s.json"}'}, "example.com"),
    "itself": ({"json": '{"$ref": "#"}'}, "never ends"),
    "endless": ({"json": json.dumps(ENDLESS)}, "never ends"),
    "endless list": ({"json": json.dumps(ENDLESS_LIST)}, "never ends"),
    "nested 60 deep, 400": ({"json": '{"items":' * 400 + "{}" + "}" * 400}, "recursion|deeply"),
    "nested 5000 deep": ({"json": "[" * 5000}, "deeply"),
    "long pattern": ({"json": json.dumps({"pattern": "a?" * 3000})}, "pattern of 6000"),
    "many remainders": ({"json": '{"multipleOf": -292604186}'}, "rounder"),
    "many digits": ({"json": '{"multipleOf": 0.123456789}'}, "rounder"),
    "more digits than a float holds": ({"json": f'{{"multipleOf": {"7" * 400}}}'}, "rounder"),
    "many remainders together": (
        {"json": '{"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}'},
        "rounder",
    ),
    "json in lark": ({"grammar": 'start: %json {"multipleOf": 99999989}'}, "send it as json"),
    "thousands of optional properties": (
        {"json": json.dumps({"properties": {str(number): {} for number in range(3000)}})},
        "optional properties",
    ),
    "half a character": ({"json": '{"const": "\\ud800"}'}, "hex escape|surrogate"),
    "open bracket": ({"regex": "(a"}, "unclosed group"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences"),
    "look ahead": ({"regex": "(?=a)b"}, "look-around"),
    "no text at all": ({"regex": "[^\\s\\S]"}, "no answer can fit"),
    "settings of ours": ({"grammar": '%llguidance {}\nstart: "a"'}, "%llguidance is not"),
    # Its message about this is cut inside a character.
    "what the library panics on": (
        {"json": json.dumps({"pattern": ["x" * 91 + "\U00039f66" * 9]})},
        PANICKED,
    ),
    "no lark": ({"grammar": "start: ("}, ".+"),
    "no start": ({"grammar": 'a: "b"'}, "start"),
    "file": ({"grammar": '%import /etc/passwd\nstart: "a"'}, ".+"),
    "endless lark": ({"grammar": 'start: "a" start'}, "never ends"),
    "endless gbnf": ({"grammar": 'root ::= "a" b\nb ::= root | "(" b ")"'}, "never ends"),
    "deep lark": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    "deep gbnf": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
}


@pytest.mark.parametrize(("wanted", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_unenforceable_constraints_are_refused_with_the_reason(
    wanted: dict[str, Any], reason: str, library: GrammarLibrary
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        library.compile(StructuredOutputs(**wanted))

    assert refusal.value.field == "structured_outputs"
    assert len(str(refusal.value)) < 600
    assert isinstance(refusal.value, TemporaryRefusal) is (reason == PANICKED)


FOUND_WITH_A_TOKENIZER = {"no text at all"}


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - FOUND_WITH_A_TOKENIZER))
def test_unsupported_constraints_are_refused_without_a_tokenizer(name: str) -> None:
    wanted, reason = REFUSED[name]
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(**wanted))


@pytest.mark.parametrize(("wanted", "good", "bad"), FITTING, ids=lambda one: str(one)[:40])
def test_enforceable_constraints_pass_the_checks(
    wanted: StructuredOutputs, good: list[str], bad: list[str]
) -> None:
    validate_grammar(wanted)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "none of them"),
    "two": ({"regex": "a", "json": "{}"}, "json and regex"),
    "whitespace of a regex": ({"regex": "a", "disable_any_whitespace": True}, "applies to JSON"),
    "empty choice": ({"choice": ("a", "")}, "empty text"),
    "too many": ({"choice": tuple(map(str, range(MAX_CHOICES + 1)))}, "at most 1024"),
    "too long": ({"regex": "a" * 5000}, "5000 characters; at most 4096"),
    "half a character": ({"choice": ("\ud800",)}, "surrogate"),
}


@pytest.mark.parametrize(("wanted", "reason"), WRONG.values(), ids=WRONG.keys())
def test_malformed_constraints_are_refused(wanted: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(**wanted))


def test_a_chain_of_thousands_of_rules_does_not_overflow_the_stack(folder: Path) -> None:
    """On a thread with a normal stack size, this grammar crashed the process."""
    rules = "".join(f"r{n}: r{n + 1}\n" for n in range(1300))
    wanted = StructuredOutputs(grammar=f'start: r0\n{rules}r1300: "a"')
    outcomes: queue.SimpleQueue[Grammar | InvalidRequest] = queue.SimpleQueue()
    library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))

    with GrammarCompiler[Grammar](library.compile) as compiler:
        compiler.start(wanted, outcomes.put)
        outcome = outcomes.get(timeout=PATIENCE_S)

    assert not isinstance(outcome, InvalidRequest)


def test_an_unbounded_repetition_is_matched_one_token_at_a_time(
    library: GrammarLibrary, tokenizer: Tokenizer
) -> None:
    """The first part matches everything, so lookahead for the second did not terminate."""
    grammar = library.compile(StructuredOutputs(grammar="start: /y+/ /y+/"))

    tokens = tokenizer.encode("yyy", add_special_tokens=False)
    matcher = grammar.matcher()
    matcher.advance(tokens)
    assert EOS_TOKEN_ID not in allowed_by(matcher)


def test_a_forced_text_may_use_any_tokenization(
    library: GrammarLibrary, tokenizer: Tokenizer
) -> None:
    matcher = library.compile(StructuredOutputs(choice=("the quick",))).matcher()

    spelled = {tokenizer.token(token).text for token in allowed_by(matcher)}
    assert {"t", "the"} <= spelled


def test_a_refusal_by_the_clock_is_temporary(
    library: GrammarLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_backend, "MAX_COMPILE_S", -1.0)

    with pytest.raises(TemporaryRefusal, match="CPU time"):
        library.compile(StructuredOutputs(regex="a"))


def test_without_a_tokenizer_the_error_names_the_missing_file(tmp_path: Path) -> None:
    library = GrammarLibrary(SafetensorsFolder(tmp_path), VOCAB_SIZE, (EOS_TOKEN_ID,))

    with pytest.raises(TemporaryRefusal, match=r"tokenizer\.json"):
        library.compile(StructuredOutputs(regex="a"))


def test_the_matcher_state_does_not_depend_on_how_tokens_are_batched(
    library: GrammarLibrary, tokenizer: Tokenizer
) -> None:
    grammar = library.compile(StructuredOutputs(json=json.dumps(LINKED)))
    tokens = tokenizer.encode('{"n": {"n":', add_special_tokens=False)
    at_once, one_by_one = grammar.matcher(), grammar.matcher()
    at_once.advance(tokens)
    for token in tokens:
        one_by_one.advance([token])
        allowed_by(one_by_one)

    assert allowed_by(at_once) == allowed_by(one_by_one) != allowed_by(grammar.matcher())


def test_every_end_token_of_the_model_may_end_an_answer(folder: Path) -> None:
    library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID, 1))
    matcher = library.compile(StructuredOutputs(regex="")).matcher()

    assert allowed_by(matcher) == {1, EOS_TOKEN_ID}


def test_tokens_outside_the_grammar_raise(library: GrammarLibrary, tokenizer: Tokenizer) -> None:
    matcher = library.compile(StructuredOutputs(regex="[0-9]+")).matcher()

    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        matcher.advance(tokenizer.encode("no", add_special_tokens=False))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"structures": []}, "1 to 256 structures"),
        ({"structures": "f"}, "lists structures and triggers"),
        ({"structures": [{"begin": "<call>"}]}, "must have begin and schema"),
        ({"structures": [{"begin": "f", "schema": True}]}, "no trigger begins 'f'"),
        ({"triggers": ["<call>", "<other>"]}, "no structure begins with the trigger '<other>'"),
        ({"triggers": ["<call>", "<c"]}, "the trigger '<c' begins another one"),
        ({"triggers": [""]}, "none empty"),
        (
            {"structures": [{"begin": "<call>", "schema": {"not": {"pattern": "a.b"}}}]},
            "the keyword not is not supported",
        ),
        (
            {"structures": [{"begin": "<call>", "schema": {"uniqueItems": True}}]},
            "the keyword uniqueItems is not supported",
        ),
    ],
)
def test_wrong_structural_tags_are_refused_with_the_reason(
    changed: dict[str, Any], reason: str
) -> None:
    tag = StructuredOutputs(structural_tag=json.dumps({**CALLS, **changed}))

    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(tag)


def test_special_tokens_of_a_structural_tag_are_tokens(library: GrammarLibrary) -> None:
    structure = {"begin": "<s>f:", "schema": {"const": 1}, "end": "<pad>"}
    tag = {"structures": [structure], "triggers": ["<s>"]}
    matcher = library.compile(StructuredOutputs(structural_tag=json.dumps(tag))).matcher()

    assert {1, EOS_TOKEN_ID} <= allowed_by(matcher)
    matcher.advance([1])

    assert EOS_TOKEN_ID not in allowed_by(matcher)
