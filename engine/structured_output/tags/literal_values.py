"""Grammar of arguments in another notation than JSON, by the schema of a tool. Pure.

Supported are types, constants, alternatives (`anyOf`), references, and the keywords of `KEYWORDS`.
What the notation cannot be held to is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from baton.engine.structured_output.schemas.subschemas import TYPES, kind_of, resolve_pointer
from baton.engine.structured_output.tags.literal_syntax import (
    NUMBER_KEYWORDS,
    PythonSyntax,
    QuotedSyntax,
    SchemaText,
    Syntax,
)
from baton.engine.structured_output.tags.rules import Rules
from baton.engine.structured_output.tags.structural_tag import LiteralNotation

KEYWORDS: Mapping[str, Collection[str]] = {
    "null": (),
    "boolean": (),
    "integer": NUMBER_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
WITHOUT_EFFECT = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$defs", "definitions", "x-guidance"}
)
MAX_ANY_DEPTH = 6  # of a value without a schema
MAX_ITEMS = 4096


def literal_arguments(
    schema: Any, notation: LiteralNotation, rules: Rules, schema_of: SchemaText
) -> str:
    """Return an expression. Raises ValueError with the reason if it cannot be enforced."""
    root = json.loads(schema_of(schema))  # checked, and with what is combined as alternatives
    root.pop("$id", None)  # references are to this schema; below, they would be to another one
    if notation.quote:
        return _LiteralValues(
            QuotedSyntax(notation.quote, rules, schema_of), rules, root
        ).arguments()
    return _LiteralValues(PythonSyntax(rules, schema_of), rules, root).arguments()


class _RefusedArgument(ValueError):
    """Has the name of what is refused."""


class _LiteralValues:
    def __init__(self, syntax: Syntax, rules: Rules, root: Any) -> None:
        self._syntax, self._rules, self._root = syntax, rules, root

    def arguments(self) -> str:
        syntax, schema = self._syntax, self._root
        while isinstance(schema, dict) and schema.keys() - WITHOUT_EFFECT == {"$ref"}:
            schema = resolve_pointer(self._root, schema["$ref"])
        keys = schema.keys() - WITHOUT_EFFECT if isinstance(schema, dict) else set()
        if not keys or keys - {"type", *KEYWORDS["object"]} or schema.get("type") != "object":
            raise ValueError(
                f"arguments in {syntax.name} need a schema of an object, without alternatives"
            )
        members = self._members(schema, syntax.argument, syntax.any_argument)
        return f"{syntax.begin_of_arguments()} {members} {syntax.end_of_arguments()}"

    def _value(self, schema: Any) -> str:
        if schema is False:
            raise ValueError("no value matches it")
        if schema is None:
            raise ValueError("its $ref does not point to a schema")
        keys = schema.keys() - WITHOUT_EFFECT if isinstance(schema, dict) else set()
        if not keys:
            return self._any(MAX_ANY_DEPTH)
        if "$ref" in keys:
            self._check_alone("$ref", keys)
            return self._reference(schema["$ref"])
        for name in ("anyOf", "allOf"):
            if name in keys:
                self._check_alone(name, keys)
                branches = [each for each in schema[name] if each is not False]
                if not branches or (name == "allOf" and len(schema[name]) > 1):
                    raise ValueError("its schema cannot combine others")
                return f"({' | '.join(map(self._value, branches))})"
        if keys & {"const", "enum"}:
            return self._constants(schema, keys)
        return self._typed(schema, keys)

    def _check_alone(self, name: str, keys: Collection[str]) -> None:
        others = set(keys) - {name}
        if others:
            raise ValueError(f"{min(others)} cannot be next to {name}")

    def _reference(self, ref: str) -> str:
        def lines(name: str) -> list[str]:
            return [f"{name}: {self._value(resolve_pointer(self._root, ref))}"]

        return self._rules.named("ref", (self, ref), lines)

    def _constants(self, schema: Mapping[str, Any], keys: Collection[str]) -> str:
        others = set(keys) - {"type", "const", "enum"}
        if others or {"const", "enum"} <= set(keys):
            raise ValueError(f"{min(others or {'const'})} cannot be next to constants")
        kinds = set(_types(schema)) | (
            {"integer", "fraction"} if "number" in _types(schema) else set()
        )
        values = [schema["const"]] if "const" in keys else schema["enum"]
        found = [self._constant(each) for each in values if kind_of(each) in kinds]
        if not found:
            raise ValueError("no value matches it")
        return f"({' | '.join(found)})"

    def _constant(self, value: Any) -> str:
        syntax = self._syntax
        match value:
            case None | bool():
                return syntax.words[json.dumps(value)]
            case str():
                return syntax.string(value)
            case list():
                return f'("[" {self._row(map(self._constant, value))} "]")'
            case dict():
                pairs = (f"{syntax.key(key)} {self._constant(each)}" for key, each in value.items())
                return f'("{{" {self._row(pairs)} "}}")'
        return json.dumps(json.dumps(value))

    def _row(self, found: Any) -> str:
        return f" {self._syntax.separator} ".join(found)

    def _typed(self, schema: Mapping[str, Any], keys: Collection[str]) -> str:
        unknown = set(keys) - {"type"} - {each for names in KEYWORDS.values() for each in names}
        if unknown:
            raise ValueError(f"{min(unknown)} cannot be enforced")
        found = []
        for kind in _types(schema):
            own = {"type": kind, **{key: schema[key] for key in keys if key in KEYWORDS[kind]}}
            found.append(self._of_type(kind, own))
        return f"({' | '.join(found)})"

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        syntax = self._syntax
        match kind:
            case "null":
                return syntax.words["null"]
            case "boolean":
                return f"{syntax.words['true']} | {syntax.words['false']}"
            case "integer" | "number":
                return syntax.number(schema)
            case "string":
                has_more = len(schema) > 1
                return syntax.constrained_string(schema) if has_more else syntax.any_string()
            case "array":
                return self._list(schema)
        return f'"{{" {self._members(schema, syntax.key, syntax.any_key)} "}}"'

    def _list(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if least > MAX_ITEMS or (most is not None and not least <= most <= MAX_ITEMS):
            raise ValueError(f"it can have at most {MAX_ITEMS} items")
        if most == 0 or schema.get("items") is False:
            if least:
                raise ValueError("no value matches it")
            return '"[" "]"'
        item = self._value(schema.get("items", True))
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        row = item if most == 1 else f"{item} ({self._syntax.separator} {item}){times}"
        return f'"[" {row} "]"' if least else f'"[" ({row})? "]"'

    def _members(
        self,
        schema: Mapping[str, Any],
        key: Callable[[str], str],
        any_key: Callable[[Collection[str]], str],
    ) -> str:
        """Return the properties in their order, with separators, and then others."""
        more = schema.get("additionalProperties", True)
        required = set(schema.get("required", ()))
        own = schema.get("properties", {})
        properties = {**own, **dict.fromkeys(sorted(required - own.keys()), more)}
        separator, first, following = self._syntax.separator, "", ""
        if more is not False:
            pair = f"{any_key(properties)} {self._value(more)}"
            following = self._rules.once("more", f"({separator} {pair})*")
            first = self._rules.once("first", f"({pair} {following})?")
        for name, part in reversed(properties.items()):
            if part is False and name not in required:
                continue
            one = f"{self._member(key, name, part)} {following}"
            if name in required:
                first, after = one, f"{separator} {one}"
            else:
                first = f"{one} | {first}" if first else f"({one})?"
                after = (
                    f"({separator} {one} | {following})" if following else f"({separator} {one})?"
                )
            first, following = (
                self._rules.once("first", first),
                self._rules.once("following", after),
            )
        return first

    def _member(self, key: Callable[[str], str], name: str, schema: Any) -> str:
        try:
            return f"{key(name)} {self._value(schema)}"
        except _RefusedArgument:
            raise
        except ValueError as error:
            raise _RefusedArgument(
                f"{name!r} is written in {self._syntax.name}, so {error}"
            ) from error

    def _any(self, depth: int) -> str:
        """Return a value without a schema, nested so deep."""
        syntax = self._syntax

        def lines(name: str) -> list[str]:
            words = " | ".join(syntax.words.values())
            scalars = f"{syntax.any_string()} | {syntax.number({'type': 'number'})} | {words}"
            if depth == 0:
                return [f"{name}: {scalars}"]
            item = self._any(depth - 1)
            row = f"{item} ({syntax.separator} {item})*"
            pair = f"{syntax.any_key(())} {item}"
            pairs = f"{pair} ({syntax.separator} {pair})*"
            return [f'{name}: {scalars} | "[" ({row})? "]" | "{{" ({pairs})? "}}"']

        return self._rules.named("any", ("any", depth), lines)


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", TYPES)
    return [types] if isinstance(types, str) else list(types)
