"""Types of tool arguments that a model writes as plain text, by the tools' schemas. Pure."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from baton.engine.structured_output.schemas.subschemas import read_list, resolve_pointer
from baton.router.text_events.formats.json_calls import strict_loads

ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
COMBINING = ("anyOf", "oneOf", "allOf")
MAX_SCHEMAS = 256  # read for one parameter
MAX_PYTHON_CHARACTERS = 1 << 14  # of a list or dictionary in Python's notation
PYTHON_WORDS = {"True": True, "False": False, "None": None}


class _Part(NamedTuple):
    """A schema by itself, and the schemas that apply to the same value."""

    types: frozenset[str]
    others: Sequence[Any]


class ArgumentTypes:
    """JSON types of each tool's parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._parts: dict[int, _Part] = {}  # by the id of the schema
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._schemas[function["name"]] = (
                    parameters if isinstance(parameters, Mapping) else {}
                )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._schemas)

    def of(self, function: str, parameter: str) -> frozenset[str]:
        """Return the types that the schema allows; all if it does not say, or is too large."""
        root = self._schemas.get(function, {})
        properties = root.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        pending = [root.get("additionalProperties") if found is None else found]
        types: set[str] = set()
        seen: set[int] = set()
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            if len(seen) == MAX_SCHEMAS:
                return ANY_TYPE
            seen.add(id(schema))
            part = self._part(schema, root)
            types |= part.types
            pending += part.others
        return frozenset(types) or ANY_TYPE

    def _part(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> _Part:
        part = self._parts.get(id(schema))
        if part is None:
            others = (each for name in COMBINING for each in read_list(schema, name))
            ref = schema.get("$ref")
            target = resolve_pointer(root, ref) if isinstance(ref, str) else None
            part = _Part(_own_types(schema), [target, *islice(others, MAX_SCHEMAS)])
            self._parts[id(schema)] = part
        return part


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    types = {each for each in (given, *read_list(schema, "type")) if isinstance(each, str)}
    if "const" in schema:
        types.add(_type_of(schema["const"]))
    if given is None:
        types.update(map(_type_of, read_list(schema, "enum")))
    return frozenset(types)


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument that a model wrote as plain text.

    It is a string where the schema allows nothing else, or where the text is nothing else.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = strict_loads(text)
    except (ValueError, RecursionError):
        value = _python_value(text.strip(), types)
    is_allowed = _type_of(value) in types or (_type_of(value) == "integer" and "number" in types)
    if "string" in types and types != ANY_TYPE and not is_allowed:
        value = text
    return json.dumps(value, ensure_ascii=False)


def _python_value(text: str, types: frozenset[str]) -> Any:
    if text in PYTHON_WORDS:
        value = PYTHON_WORDS[text]
        return value if _type_of(value) in types else text
    is_short = len(text) <= MAX_PYTHON_CHARACTERS
    if is_short and text[:1] in ("{", "[") and types & {"object", "array"}:
        try:
            value = ast.literal_eval(text)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return text
        return value
    return text
