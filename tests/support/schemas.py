"""Random JSON schemas of all supported keywords, and the validation of answers."""

from __future__ import annotations

import json
import random
import string
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

PATTERNS = (r"^[a-z]{1,4}$", r"^\d{3}-\d{2}$", r"^(red|green|blue)$", r"^[A-F0-9]{2,6}$")
FORMATS = ("date", "time", "uuid", "ipv4")
DEEPEST = 3


def random_schema(chance: random.Random) -> Schema:
    """Return a schema that is small enough for a random model to complete most answers."""
    schema = _schema(chance, DEEPEST)
    if chance.random() < 0.2:
        return _linked(chance, schema)
    return schema


def is_valid(text: str, schema: Schema) -> bool:
    """Return whether a JSON text matches the schema. Raises ValueError if it is not JSON."""
    value = json.loads(text, parse_constant=_refuse)
    return bool(Draft202012Validator(schema).is_valid(value))


def _schema(chance: random.Random, depth: int) -> Schema:
    kinds = [_integer, _number, _string, _enum, _const, _boolean, _null, _types]
    if depth > 0:
        kinds += [_object] * 5 + [_array] * 3 + [_any_of] * 2
    return chance.choice(kinds)(chance, depth)


def _object(chance: random.Random, depth: int) -> Schema:
    names = ["".join(chance.choices(string.ascii_lowercase + " é", k=chance.randint(1, 5)))]
    names += [f"{names[0]}{place}" for place in range(chance.randint(0, 3))]
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
    }
    if chance.random() < 0.85:
        schema["additionalProperties"] = False
    elif chance.random() < 0.5:
        schema["additionalProperties"] = _schema(chance, 0)
    return schema


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    schema: Schema = {
        "type": "array",
        "minItems": least,
        "maxItems": least + chance.randint(0, 2),
        "items": _schema(chance, depth - 1),
    }
    if chance.random() < 0.3:
        schema["prefixItems"] = [_schema(chance, depth - 1) for _ in range(chance.randint(1, 2))]
    return schema


def _any_of(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(chance.randint(2, 3))]}


def _integer(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 99)}
    if chance.random() < 0.2:
        schema = {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 5}
    if chance.random() < 0.1:
        schema = {"type": "integer", "multipleOf": chance.choice([2, 5, 7]), "minimum": 0}
    return schema


def _number(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(-50, 50)
    return {"type": "number", "minimum": least, "maximum": least + chance.randint(1, 20)}


def _string(chance: random.Random, depth: int) -> Schema:
    draw = chance.random()
    if draw < 0.25:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    if draw < 0.4:
        return {"type": "string", "format": chance.choice(FORMATS)}
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 8)}


def _enum(chance: random.Random, depth: int) -> Schema:
    values = ["a", "b c", 'say "x"', "naïve", 1, -2.5, True, None, ["x", 1], {"k": "v"}]
    return {"enum": chance.sample(values, chance.randint(1, 4))}


def _const(chance: random.Random, depth: int) -> Schema:
    return {"const": chance.choice(["fixed", 42, None, [1, 2], {"deep": {"er": True}}])}


def _boolean(chance: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _null(chance: random.Random, depth: int) -> Schema:
    return {"type": "null"}


def _types(chance: random.Random, depth: int) -> Schema:
    kinds = chance.sample(["boolean", "null", "integer"], 2)
    return {"type": kinds, "minimum": 0, "maximum": 50}


def _linked(chance: random.Random, value: Schema) -> Schema:
    """Return a linked list, which refers to its own schema."""
    link = {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}
    node = {
        "type": "object",
        "properties": {"value": {"$ref": "#/$defs/value"}, "next": link},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"link": node, "value": value}, "$ref": "#/$defs/link"}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
