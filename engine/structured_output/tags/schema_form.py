"""Check that keywords of a schema have values of the right form. Pure.

llguidance checks what it compiles; the rules of other notations than JSON are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.engine.structured_output.schemas.subschemas import TYPES, list_subschemas


def check_form(schema: Any) -> None:
    """Raises ValueError with the keyword."""
    if not _is_schema(schema):
        raise ValueError("a JSON schema is an object or a boolean")
    for part in list_subschemas(schema):
        for keyword, has_form in FORMS.items():
            if keyword in part and not has_form(part[keyword]):
                raise ValueError(f"the value of {keyword} is not one that it can have")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(each in TYPES for each in types)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


_SINGLE = ("items", "additionalProperties")
_SEVERAL = ("anyOf", "oneOf", "allOf")
_NAMED = ("properties", "$defs", "definitions")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_TEXTS = ("$ref", "pattern", "format")
FORMS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_SINGLE, _is_schema),
    **dict.fromkeys(_SEVERAL, _are_schemas),
    **dict.fromkeys(_NAMED, _are_named_schemas),
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_TEXTS, _is_text),
    "type": _is_type,
    "required": _are_texts,
    "enum": _is_list,
}
