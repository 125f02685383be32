"""Hostile constraints of structured outputs: each is compiled and followed, or refused."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs, parse_structured_outputs
from baton.engine.structured_output.grammar import num_words
from baton.engine.structured_output.llguidance_backend import (
    GrammarLibrary,
    validate_grammar,
)
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, save_tokenizer

KEYWORDS = [
    "type", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "enum",
    "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "minimum", "maximum", "multipleOf",
    "exclusiveMinimum", "uniqueItems", "if", "then", "$id", "$anchor", "x-guidance",
]  # fmt: skip
WORDS = [
    "object", "array", "string", "integer", "number", "null", "a", "#", "#/$defs/a",
    "#/properties/a", "#/", "http://example.com", "date", "^a+$", "(", "[", "a{1000000}",
    "\\p{L}*", "((a{99}){99}){99}",
]  # fmt: skip

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*KEYWORDS, "a", ""]), inner, max_size=5)
    ),
    max_leaves=25,
)
schemas = st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=6)
SIGNS = "()[]{}|*+?.^$\\&~<>/:=\"'-,# \n0123456789abAB%@é\x00"
noise = st.text(st.sampled_from(SIGNS), max_size=60)
expressions = st.lists(
    st.sampled_from(
        ["a", ".", "\\w", "[a-z]", "(a|b)", "*", "+", "?", "{3,90}", "{999}", "(", ")", "|", "^"]
    ),
    max_size=25,
).map("".join)  # fmt: skip
names = st.sampled_from(
    ["start", "root", "a", "b", "A", "B", '"x"', "/y+/", "(", ")", "|", "*", "?"]
)
NAMES = ("start", "root", "a", "b", "A", "B")
bodies = st.lists(names, max_size=6).map(" ".join)


def _grammars(sign: str) -> st.SearchStrategy[str]:
    rules = st.lists(st.tuples(st.sampled_from(NAMES), bodies), max_size=5)
    return rules.map(lambda made: "\n".join(f"{name} {sign} {body}" for name, body in made))


larks, gbnfs = _grammars(":"), _grammars("::=")


@cache
def library() -> GrammarLibrary:
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        made = GrammarLibrary(SafetensorsFolder(Path(folder)), VOCAB_SIZE, (EOS_TOKEN_ID,))
        made.compile(StructuredOutputs(regex="a"))  # it reads the folder now
    return made


@given(schema=schemas, draw=st.integers(0, 1 << 30))
@example(schema={"$ref": "#"}, draw=0)
@example(schema={"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, draw=0)
@example(schema={"$defs": {"a": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}}, draw=0)
@example(schema={"multipleOf": -292604186}, draw=0)
def test_any_schema_compiles_or_is_refused(schema: dict[str, Any], draw: int) -> None:
    _try(StructuredOutputs(json=json.dumps(schema)), draw)


@given(text=expressions | noise, draw=st.integers(0, 1 << 30))
def test_any_regex_compiles_or_is_refused(text: str, draw: int) -> None:
    _try(StructuredOutputs(regex=text), draw)


@given(
    text=larks | gbnfs | noise | noise.map(lambda text: f"start: {text}"), draw=st.integers(0, 99)
)
def test_any_grammar_compiles_or_is_refused(text: str, draw: int) -> None:
    _try(StructuredOutputs(grammar=text), draw)


@given(
    fields=st.dictionaries(st.sampled_from(["json", "regex", "choice", "x"]), values, max_size=3)
)
def test_any_constraint_fields_are_parsed_or_refused(fields: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        parse_structured_outputs(fields)


def _try(wanted: StructuredOutputs, draw: int) -> None:
    """Follow the constraint along random tokens; only InvalidRequest may be raised."""
    with suppress(InvalidRequest):
        validate_grammar(wanted)
        matcher = library().compile(wanted).matcher()
        bits = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
        for step in range(12):
            matcher.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            token = int(allowed[(draw >> step) % len(allowed)])
            if token == EOS_TOKEN_ID:
                return
            matcher.advance([token])
