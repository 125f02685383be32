"""Items of arrays with `uniqueItems` are compared while an answer is generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar import Matcher
from baton.engine.structured_output.llguidance_backend import GrammarLibrary, validate_grammar
from tests.support.grammars import allowed_by

DEMO = Path(__file__).parents[4] / "models" / "demo"
VOCAB_SIZE, EOS = 2048, 1


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


DIGIT = {"type": "integer", "minimum": 1, "maximum": 6}
FLAGS = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "texts": unique({"type": "string", "maxLength": 1}, minItems=4),
    "enum": unique({"enum": ["a", "ab", "abc", 1, True, None, "b"]}, minItems=7),
    "integers": unique(DIGIT, minItems=6),
    "numbers": unique({"type": "number", "minimum": 0, "maximum": 2}, minItems=3),
    "pattern": unique({"type": "string", "pattern": "^[ab]{2}$"}, minItems=2),
    "objects": unique(FLAGS, minItems=3),
    "names of any order": unique({"type": "object", "additionalProperties": {"enum": [1]}}),
    "lists of lists": unique(unique(DIGIT, maxItems=2), minItems=4),
    "alternatives": {"anyOf": [unique(DIGIT, minItems=2), {"type": "array", "items": FLAGS}]},
    "a property": {
        "type": "object",
        "properties": {"in": {"$ref": "#/$defs/in"}, "out": {"type": "array", "items": DIGIT}},
        "required": ["in", "out"],
        "$defs": {"in": unique({"type": ["string", "null"], "maxLength": 2}, minItems=3)},
    },
    "whole": {"allOf": [{"prefixItems": [DIGIT, DIGIT]}, unique(True)], "type": "array"},
}


@pytest.fixture(scope="module")
def library() -> GrammarLibrary:
    """Library of the demo model, many tokens of which span several items."""
    return GrammarLibrary(SafetensorsFolder(DEMO), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def texts(library: GrammarLibrary) -> list[bytes]:
    tokenizer = library._read_tokenizer()
    return [tokenizer.decode_bytes([token_id]) for token_id in range(VOCAB_SIZE)]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_random_answers_repeat_no_item(
    schema: dict[str, Any], library: GrammarLibrary, texts: list[bytes]
) -> None:
    grammar = library.compile(StructuredOutputs(json=json.dumps(schema)))
    answers = [answer for seed in range(4) for answer in walk(grammar.matcher(), texts, seed)]

    assert answers
    validator = Draft202012Validator(schema)
    assert [each for each in answers if not validator.is_valid(each)] == []


def walk(matcher: Matcher, texts: list[bytes], seed: int) -> Iterator[Any]:
    """Yield a random answer if it ends. Drafted tokens are tried and rolled back on the way."""
    random, written = Random(seed), b""
    for _ in range(80):
        allowed = allowed_by(matcher, VOCAB_SIZE)
        ends = sorted(each for each in allowed if texts[each][-1:] in b'"]},' and each != EOS)
        if EOS in allowed and (len(allowed) < 3 or random.random() < 0.5):
            yield json.loads(written)
            return
        token_id = random.choice(ends if ends and random.random() < 0.6 else sorted(allowed))
        if token_id == EOS:
            continue
        for draft in random.sample(sorted(allowed - {EOS}), min(2, len(allowed - {EOS}))):
            assert matcher.try_advance(draft)
            matcher.rollback(1)
        if forbidden := sorted(set(range(2, VOCAB_SIZE)) - allowed):
            assert not matcher.try_advance(random.choice(forbidden))
        matcher.advance([token_id])
        written += texts[token_id]


ALLOWED: dict[str, tuple[dict[str, Any], bytes, bytes, bool]] = {
    "another text": (unique({"type": "string"}), b'["a","a', b"b", True),
    "a repeated text": (unique({"type": "string"}), b'["a","a', b'"', False),
    "a repeated number": (unique({"type": "number"}), b"[1,1.0", b"]", False),
    "a longer number": (unique({"type": "number"}), b"[1,1.0", b"1", True),
    "other order": (unique({"type": "object"}), b'[{"a":1,"b":2},{"b":2,"a":1', b"}", False),
    "the last value": (unique({"enum": [1, 2]}), b"[1,2", b",", False),
    "a used value": (unique({"enum": ["a", "b"]}), b'["a","', b"a", False),
    "a dead end": (unique({"type": "string", "maxLength": 2}), b'["ab","a', b"b", False),
    "a way on": (unique({"type": "string", "maxLength": 3}), b'["ab","a', b"b", True),
    "a longer object": (unique(FLAGS), b'[{"a":true},{"a"', b":", True),
    "elsewhere": (
        {"properties": {"u": unique(True), "v": {"type": "array"}}, "required": ["u", "v"]},
        b'{"u":[1],"v":[1,1',
        b"]",
        True,
    ),
}


@pytest.mark.parametrize(
    ("schema", "before", "after", "is_allowed"), ALLOWED.values(), ids=ALLOWED.keys()
)
def test_a_token_is_removed_if_it_leads_to_a_repeated_item(
    schema: dict[str, Any],
    before: bytes,
    after: bytes,
    is_allowed: bool,
    library: GrammarLibrary,
    texts: list[bytes],
) -> None:
    matcher = library.compile(StructuredOutputs(json=json.dumps(schema))).matcher()
    matcher.advance([texts.index(bytes([byte])) for byte in before])

    assert (texts.index(after) in allowed_by(matcher, VOCAB_SIZE)) == is_allowed


def test_tokens_of_another_node_that_repeat_an_item_are_refused(
    library: GrammarLibrary, texts: list[bytes]
) -> None:
    matcher = library.compile(StructuredOutputs(json=json.dumps(unique(True)))).matcher()
    with pytest.raises(InvalidRequest, match="an item is repeated"):
        matcher.advance([texts.index(bytes([byte])) for byte in b"[1,1]"])


@pytest.mark.parametrize("other", [{"$dynamicRef": "#a"}, {"$id": "http://a/b"}])
def test_unique_items_are_refused_by_name_where_references_are_not_understood(
    other: dict[str, Any],
) -> None:
    schema = {"anyOf": [unique({"type": "string"}), {"$defs": {"a": other}}]}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        validate_grammar(StructuredOutputs(json=json.dumps(schema)))
