"""Closing of schemas: arguments that it excludes, and those that it must not exclude."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from baton.router.doors.openai.request.tool_choice import close_objects
from tests.support.grammars import is_whole
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, save_tokenizer

INT = {"type": "integer"}
A = {"type": "object", "properties": {"a": INT}}
B = {"type": "object", "properties": {"b": INT}, "required": ["b"]}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": {**A, "properties": {"below": {"$ref": "#/$defs/tree"}, "a": INT}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return path


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "named": (A, ["{}", '{"a":1}'], ['{"x":1}', '{"a":1,"x":1}']),
    "without a name": ({"type": "object", "properties": {}}, ["{}"], ['{"x":1}']),
    "any object": ({"type": "object"}, ["{}", '{"x":1}'], ["1"]),
    "open": ({**A, "additionalProperties": True}, ['{"a":1,"x":[]}'], ['{"a":[]}']),
    "others of a schema": ({**A, "additionalProperties": INT}, ['{"x":1}'], ['{"x":[]}']),
    "a pattern": (
        {**A, "patternProperties": {"^x": INT}},
        ['{"a":1,"x1":2}'],
        ['{"y":1}', '{"x":[]}'],
    ),
    "only a pattern": (
        {"type": "object", "patternProperties": {"^x": INT}},
        ['{"x1":2}', '{"y":[]}'],
        ['{"x":[]}'],
    ),
    "required, but not described": ({**A, "required": ["z"]}, ['{"z":[]}'], ['{"z":1,"x":1}']),
    "nested": (
        {"type": "object", "properties": {"p": A, "list": {"type": "array", "items": B}}},
        ['{"p":{"a":1},"list":[{"b":1}]}'],
        ['{"p":{"x":1}}', '{"list":[{"b":1,"x":1}]}'],
    ),
    "a reference": (TREE, ['{"below":{"a":1}}'], ['{"x":1}', '{"below":{"x":1}}']),
    "alternatives": (
        {"anyOf": [A, B, {"type": "null"}]},
        ['{"a":1}', '{"b":1}', "null"],
        ['{"a":1,"b":1}', '{"x":1}'],
    ),
    "all of one": ({"allOf": [A]}, ['{"a":1}'], ['{"x":1}']),
    "all of two": ({"allOf": [A, B]}, ['{"a":1,"b":1}'], ['{"a":1}', '{"b":1,"x":1}']),
    "all of two references": (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"c": INT}}],
            "$defs": {"a": A},
        },
        ['{"a":1,"c":1}'],
        ['{"a":1,"x":1}'],
    ),
    "a reference and more": (
        {"$ref": "#/$defs/a", "properties": {"c": INT}, "$defs": {"a": A}},
        ['{"a":1,"c":1}'],
        ['{"x":1}'],
    ),
    "one of two names": (
        {**A, "anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
        ['{"a":1}', '{"c":"any"}'],
        ["{}", '{"a":1,"x":1}'],
    ),
    "all of an open one": (
        {"allOf": [A, {**B, "additionalProperties": True}]},
        ['{"a":1,"b":1,"x":1}'],
        ['{"a":1}'],
    ),
    "names like keywords": (
        {"type": "object", "properties": {"properties": INT, "allOf": INT, "$ref": INT}},
        ['{"properties":1,"allOf":2,"$ref":3}'],
        ['{"items":1}'],
    ),
}


@pytest.mark.parametrize(("schema", "good", "bad"), CASES.values(), ids=CASES.keys())
def test_a_closed_object_has_only_the_properties_of_its_schema(
    schema: dict[str, Any], good: list[str], bad: list[str], folder: Path
) -> None:
    tokenizer = load_tokenizer(folder)
    given = json.dumps(schema)
    library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))

    grammar = library.compile(StructuredOutputs(json=json.dumps(close_objects(schema))))

    assert [text for text in good if not is_whole(grammar, tokenizer, text)] == []
    assert [text for text in bad if is_whole(grammar, tokenizer, text)] == []
    assert json.dumps(schema) == given


def test_an_invalid_schema_is_passed_through_to_the_compiler() -> None:
    wrong: dict[str, Any] = {
        "properties": 5,
        "allOf": [A, 5],
        "$ref": 7,
        "anyOf": {"a": 1},
        "oneOf": [{"$ref": "#/oneOf"}, {"$ref": "#/nowhere/0"}, {"$ref": "http://a/b"}],
    }

    assert close_objects(wrong)["properties"] == 5


LONG_CHAIN = {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(300)}
MANY_NAMES = {"c0": {"properties": {f"a{n}": INT for n in range(300)}}}


@pytest.mark.parametrize("shared", [LONG_CHAIN, MANY_NAMES], ids=["a long chain", "many names"])
def test_closing_combinations_of_shared_schemas_is_bounded(shared: dict[str, Any]) -> None:
    both = [{"$ref": "#/$defs/c0"}, {"properties": {"a": INT}}]
    parts = {f"p{n}": {"allOf": both} for n in range(3000)}

    closed = close_objects({"type": "object", "properties": parts, "$defs": shared})

    assert closed["additionalProperties"] is False
    # The first combinations are closed, and those beyond the limit of work stay open.
    is_closed = ["additionalProperties" in part for part in closed["properties"].values()]
    assert 10 < sum(is_closed) < 100
