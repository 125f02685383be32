"""Traversal of the subschemas of a JSON schema by keyword. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

# Keywords whose values are data, not schemas.
DATA = frozenset({"const", "enum", "default", "example", "examples"})
# Keywords that map names to schemas. A name can look like a keyword.
BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)

# Keywords of any draft that a value can violate. By the standard, `format` is an annotation.
CONSTRAINTS = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then"),
        *("else", "type", "enum", "const", "multipleOf", "divisibleBy", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "items"),
        *("prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains"),
        *("maxContains", "minItems", "maxItems", "uniqueItems", "properties", "required"),
        *("patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependencies", "dependentRequired"),
        *("dependentSchemas", "extends", "disallow"),
    }
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def rewrite_subschemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of `schema` with `change` applied to each subschema, the outermost first.

    Unknown keywords can contain schemas, too, since references can point anywhere.
    """
    if isinstance(schema, list):
        return [rewrite_subschemas(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copied: dict[str, Any] = {}
    for name, value in change(schema).items():
        if name in DATA:
            copied[name] = value
        elif name in BY_NAME and isinstance(value, dict):
            copied[name] = {each: rewrite_subschemas(value[each], change) for each in value}
        else:
            copied[name] = rewrite_subschemas(value, change)
    return copied


def list_subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield `schema` and each subschema, the parts that `rewrite_subschemas` changes."""
    if isinstance(schema, list):
        for each in schema:
            yield from list_subschemas(each)
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            yield from list_subschemas(list(value.values()))
        elif name not in DATA:
            yield from list_subschemas(value)


def list_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside a JSON value, constants included: references can point anywhere."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value
    for each in inner if isinstance(value, dict | list) else ():
        yield from list_objects(each)


def read_list(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the list under a keyword, an empty one if there is none."""
    found = schema.get(name)
    return found if isinstance(found, list) else ()


def resolve_pointer(root: Any, ref: str) -> Any:
    """Return the part that a local reference points to, or None if there is none."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    part = root
    for token in unquote(ref).split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part


def changes_base(part: Mapping[str, Any]) -> bool:
    """Return whether the part changes the base URI of the references inside it."""
    ids = (part.get(name) for name in ("$id", "id"))
    return any(isinstance(each, str) and not each.startswith("#") for each in ids)


def kind_of(value: Any) -> str:
    """Return the type of a JSON value. A number is an `integer` or a `fraction`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"
