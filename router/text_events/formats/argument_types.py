"""Types of tool arguments that a model writes as plain text, by the tools' schemas. Pure."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.router.text_events.formats.strict_json import strict_loads

ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_DEPTH = 8
MAX_PYTHON_CHARACTERS = 1 << 14  # of a list or dictionary in Python's notation
PYTHON_WORDS = {"True": True, "False": False, "None": None}


class ArgumentTypes:
    """JSON types of each tool's parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
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
        """Return the types that the schema allows; all if it does not say."""
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        if found is None:
            found = schema.get("additionalProperties")
        return frozenset(_types(found, schema, MAX_DEPTH)) or ANY_TYPE


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    types = schema.get("type")
    yield from (name for name in ([types] if isinstance(types, str) else types or ()))
    if "const" in schema:
        yield _type_of(schema["const"])
    if types is None and isinstance(schema.get("enum"), list):
        yield from map(_type_of, schema["enum"])
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/"):
        part: Any = root
        for name in ref[2:].split("/"):
            part = part.get(name) if isinstance(part, Mapping) else None
        yield from _types(part, root, depth - 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(keyword) or ():
            yield from _types(branch, root, depth - 1)


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
