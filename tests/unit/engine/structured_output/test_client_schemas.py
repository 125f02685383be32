"""Schemas as client libraries and tools write them are accepted."""

from __future__ import annotations

import json
import random
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, create_model

from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.llguidance_backend import validate_grammar
from baton.engine.structured_output.schemas.patterns import translatable


class Colour(Enum):
    RED = "red"
    GREY = "grey"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Fish(BaseModel):
    kind: Literal["fish"] = "fish"


class Bird(BaseModel):
    kind: Literal["bird"] = "bird"
    colour: Colour = Colour.GREY


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str | None = Field(default=None, description="optional")


class Tree(BaseModel):
    value: int
    left: Tree | None = None
    children: list[Tree] = []


Tagged = Annotated[Cat | Dog, Field(discriminator="kind")]
TaggedByDefault = Annotated[Fish | Bird, Field(discriminator="kind")]
TYPES: dict[str, Any] = {
    "set": set[str],
    "set of literals": frozenset[Literal["a", "b", "c"]],
    "sets in a list": list[set[int]],
    "union": int | str | Cat | None,
    "tagged union": list[Tagged],
    "union tagged by default": TaggedByDefault,
    "union of tagged unions": Annotated[Tagged | TaggedByDefault, Field(discriminator="kind")],
    "literal": Literal["x", 1, None, True],
    "constrained integer": Annotated[int, Field(ge=1, lt=10, multiple_of=2)],
    "constrained text": Annotated[str, Field(min_length=1, max_length=9, pattern="^[a-z]+$")],
    "constrained list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "dict": dict[str, list[Closed]],
    "dict of literals": dict[Literal["a", "b"], Closed],
    "dict of an enum": dict[Colour, int],
    "dict of ids": dict[UUID, int],
    "dict of a pattern": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "tuple": tuple[int, str, Colour],
    "any JSON": JsonValue,
    "tree": Tree,
    "closed": Closed,
    "formats": tuple[datetime, date, timedelta, Decimal, UUID, bytes],
}


def test_schemas_of_pydantic_are_accepted() -> None:
    adapters = [TypeAdapter(each) for each in TYPES.values()]
    adapters.append(
        TypeAdapter(create_model("All", **{f"f{n}": t for n, t in enumerate(TYPES.values())}))
    )

    for adapter in adapters:
        validate(adapter.json_schema())
        validate(adapter.json_schema(mode="serialization"))


@pytest.mark.parametrize("default", [..., "kind"], ids=["required tag", "tag by default"])
def test_a_tagged_union_of_a_hundred_models_is_accepted(default: Any) -> None:
    union: Any = Cat
    for index in range(100):
        kind: Any = (Literal[f"kind{index}"], f"kind{index}" if default == "kind" else ...)
        fields: Any = {f"field{number}": (str, ...) for number in range(8)}
        union = union | create_model(f"Event{index}", kind=kind, **fields)

    validate(TypeAdapter(Annotated[union, Field(discriminator="kind")]).json_schema())


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT: Any = {"type": "string"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
# Of zod 4.1: llguidance refuses its look-ahead.
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "zod: email": {
        **DRAFT_2020,
        **closed(mail={**TEXT, "format": "email", "pattern": ZOD_EMAIL}),
    },
    "zod: intersection": {
        **DRAFT_7,
        "allOf": [{"type": "object", "properties": {"a": TEXT}}, closed(b=TEXT)],
    },
    "zod: undefined in a union": {"type": "array", "items": {"anyOf": [{"not": {}}, TEXT]}},
    "zod: never": {"type": "object", "properties": {"a": {"not": {}}, "b": TEXT}},
    "zod: set": {**DRAFT_7, "type": "array", "uniqueItems": True, "items": TEXT},
    "zod: record": {"type": "object", "propertyNames": TEXT, "additionalProperties": {}},
    "zod: record of an enum": {
        **DRAFT_2020,
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": TEXT,
        "required": ["a", "b"],
    },
    "zod: discriminated union": {
        "oneOf": [
            closed(type={"type": "string", "const": "a"}),
            closed(type={"const": "b"}, x=TEXT),
        ]
    },
    "zod: root in definitions": {
        **DRAFT_7,
        "$ref": "#/definitions/Root",
        "definitions": {"Root": closed(a=TEXT, b={"$ref": "#/definitions/Root/properties/a"})},
    },
    "pydantic 1: reference with a default": {
        "type": "object",
        "properties": {"x": {"title": "X", "default": {}, "allOf": [{"$ref": "#/definitions/Y"}]}},
        "definitions": {"Y": {"type": "object", "properties": {"n": {"exclusiveMinimum": 0}}}},
    },
    "OpenAI: strict": {
        "$defs": {"step": closed(why=TEXT, output={"anyOf": [TEXT, {"type": "null"}]})},
        **closed(steps={"type": "array", "items": {"$ref": "#/$defs/step"}}),
    },
    "MCP: either of two": {
        "type": "object",
        "properties": {"path": TEXT, "url": {**TEXT, "format": "uri"}},
        "oneOf": [{"required": ["path"]}, {"required": ["url"]}],
    },
    "MCP: no arguments": {"type": "object", "properties": {}},
    "Claude Code: to-do list": {
        **DRAFT_7,
        **closed(
            todos={
                "type": "array",
                "items": closed(
                    content={**TEXT, "minLength": 1},
                    status={**TEXT, "enum": ["pending", "in_progress", "completed"]},
                ),
            }
        ),
    },
    "Codex: shell": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": TEXT, "description": "The command"},
            "timeout_ms": {"type": "number"},
            "workdir": TEXT,
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_schemas_of_other_clients_are_accepted(schema: dict[str, Any]) -> None:
    validate(schema)


def test_the_pattern_of_an_email_keeps_its_texts_without_look_ahead() -> None:
    rewritten = translatable({"pattern": ZOD_EMAIL})["pattern"]
    chance = random.Random(0)
    parts = ["a", "Z9", "'", "+", "-", "_", ".", "@", "com", "é"]
    texts = ["".join(chance.choices(parts, k=chance.randint(1, 9))) for _ in range(20_000)]
    texts += [f"{each}@a-b.de" for each in texts]
    matches = [bool(re.search(ZOD_EMAIL, each)) for each in texts]

    assert [bool(re.search(rewritten, each)) for each in texts] == matches
    assert 1_000 < sum(matches) < len(texts) / 2


def validate(schema: dict[str, Any]) -> None:
    validate_grammar(StructuredOutputs(json=json.dumps(schema)))
