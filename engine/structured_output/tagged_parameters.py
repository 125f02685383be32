"""Grammar of arguments that a model writes one by one between tags, texts without quotes. Pure.

The arguments of a schema follow in the order of its `properties`. Texts can be any that do not end
the argument; all other values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.engine.structured_output.schemas.subschemas import resolve_pointer

ANY_NAME = r"/[^<>\n\"=]{1,64}/"
MAX_DEPTH = 8  # of references
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
PLAIN_KEYWORDS = {*ANNOTATIONS, "type"}
COMPOUND = {"object", "array"}

Literal = Callable[[str], str]  # a text in Lark's notation
SchemaText = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Texts around one argument. `begin` has `$name`."""

    begin: str
    end: str
    never: tuple[str, ...] = ()  # texts that would end the argument elsewhere


def text_rule(name: str, tags: ParameterTags, special_ids: Mapping[str, int]) -> str:
    """Return the rule of a text and the end of its argument."""
    free = r"/(.|\n)*/"
    if tags.never:
        ends = " | ".join(map(json.dumps, tags.never))
        free = f"({free} & ~({free} ({ends}) {free}))"
    special = next((each for each in special_ids if tags.end.startswith(each)), "")
    if not special:
        return f"{name}[lazy]: {free} {json.dumps(tags.end)}"
    rest = tags.end.removeprefix(special)
    after = f" {json.dumps(rest)}" if rest else ""
    upper = name.upper()
    return f"{upper}: {free}\n{name}: {upper} <[{special_ids[special]}]>{after}"


def parameters(
    schema: Any, tags: ParameterTags, text: str, literal: Literal, schema_of: SchemaText
) -> str:
    """Return an expression for the arguments of an object schema. `text` names `text_rule`.

    Raises ValueError if the schema cannot be enforced so.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    before, _, after = tags.begin.partition("$name")
    if schema == {"type": "object"}:
        return f"({literal(before)} {ANY_NAME} {literal(after)} {text})*"
    if not isinstance(properties, dict) or schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
        raise ValueError(
            "arguments between tags need a schema with properties, without alternatives"
        )
    required, end = schema.get("required") or (), literal(tags.end)
    found = []
    for name, part in properties.items():
        try:
            value = _value(list(_branches(part, schema, MAX_DEPTH)))
        except ValueError as error:
            raise ValueError(f"{name!r} stands between tags, so {error}") from error
        options = (
            [text] if value.is_text else [f"{literal(each)} {end}" for each in value.constants]
        )
        if value.others:
            own = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            options.append(f"%json {schema_of({'anyOf': value.others, **own})} {end}")
        one = f"{literal(f'{before}{name}{after}')} ({' | '.join(options)})"
        found.append(one if name in required else f"({one})?")
    return " ".join(found)


class Value(NamedTuple):
    is_text: bool = False  # any
    constants: Sequence[str] = ()  # as they are written
    others: Sequence[dict[str, Any]] = ()  # schemas of JSON


def _value(branches: Sequence[dict[str, Any]]) -> Value:
    """Return what a value can be. Next to any text, only values that no text can be taken for."""
    constants: list[Any] = []
    others: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for branch in branches:
        if "const" in branch or "enum" in branch:
            constants += [branch["const"]] if "const" in branch else branch["enum"]
        else:
            (texts if "string" in _types(branch) else others).append(branch)
    if not texts:
        written = [each if isinstance(each, str) else json.dumps(each) for each in constants]
        return Value(constants=written, others=others)
    if not all(each is None or isinstance(each, str) for each in constants):
        raise ValueError("it cannot be any text or one of some numbers")
    for branch in (*texts, *others):
        if branch.keys() - PLAIN_KEYWORDS:
            raise ValueError(f"a text cannot have {min(branch.keys() - PLAIN_KEYWORDS)}")
        if COMPOUND & set(_types(branch)):
            raise ValueError("it cannot be any text or an object or list")
    return Value(is_text=True)


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    types = schema.get("type", "string")
    return [types] if isinstance(types, str) else types


def _branches(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Return the alternatives of a schema. Raises ValueError if it combines schemas."""
    if not isinstance(schema, dict) or depth == 0 or "allOf" in schema:
        raise ValueError("its schema cannot combine others")
    if isinstance(schema.get("$ref"), str):
        yield from _branches(resolve_pointer(root, schema["$ref"]), root, depth - 1)
        return
    branches = schema.get("anyOf") or schema.get("oneOf")
    for branch in branches or ():
        yield from _branches(branch, root, depth - 1)
    if not branches:
        yield schema
