"""Structured outputs as requested. Compiling them, later, shows whether they can be enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest

FIELD = "structured_outputs"
# Limits on schemas, expressions and grammars, which come from untrusted clients.
MAX_CHARACTERS = {
    "json": 1 << 18,
    "regex": 1 << 12,
    "choice": 1 << 16,
    "grammar": 1 << 14,
    "structural_tag": 1 << 18,
}
MAX_CHOICES = 1024
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of six kinds of constraint. Names and meanings follow vLLM."""

    json: str | None = None  # a JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None  # matches the whole answer
    choice: tuple[str, ...] = ()
    grammar: str | None = None  # in Lark or GBNF notation
    structural_tag: str | None = None  # free text with JSON after some beginnings, as JSON
    disable_any_whitespace: bool = False  # JSON without whitespace outside of strings

    def __post_init__(self) -> None:
        fields_set = [name for name in FORMS if getattr(self, name) not in (None, False, ())]
        if len(fields_set) != 1:
            found = " and ".join(fields_set) or "none of them"
            raise InvalidRequest(
                f"{FIELD} must have one of {', '.join(FORMS)}; it has {found}", FIELD
            )
        has_json = fields_set[0] in ("json", "json_object", "structural_tag")
        if self.disable_any_whitespace and not has_json:
            raise InvalidRequest(
                f"disable_any_whitespace applies to JSON, not to a {fields_set[0]}: leave it out",
                FIELD,
            )
        self._check_text()
        self._check_choices()

    @property
    def form(self) -> str:
        """The name of the constraint that is set."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False, ()))

    @property
    def text(self) -> str:
        """The text of the constraint; choices are concatenated."""
        return "".join(filter(None, self._texts))

    @property
    def _texts(self) -> tuple[str | None, ...]:
        return (self.json, self.regex, self.grammar, self.structural_tag, *self.choice)

    def _check_text(self) -> None:
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{FIELD}.{self.form} contains half a surrogate pair: it is not valid text", FIELD
            ) from None
        num_characters, limit = len(self.text), MAX_CHARACTERS.get(self.form, 0)
        if num_characters > limit:
            raise InvalidRequest(
                f"{FIELD}.{self.form} has {num_characters} characters; at most {limit} are allowed",
                FIELD,
            )

    def _check_choices(self) -> None:
        if len(self.choice) > MAX_CHOICES:
            raise InvalidRequest(
                f"{FIELD}.choice has {len(self.choice)} texts; at most {MAX_CHOICES} are allowed",
                FIELD,
            )
        if not all(self.choice):
            raise InvalidRequest(f"{FIELD}.choice has an empty text", FIELD)


def parse_structured_outputs(given: Mapping[str, Any]) -> StructuredOutputs:
    """Parse a client's fields, where schemas can be objects. Raises InvalidRequest."""
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _READERS:
            raise InvalidRequest(f"{FIELD}.{name} is not supported: leave it out", FIELD)
        if value is not None:
            read[name] = _READERS[name](f"{FIELD}.{name}", value)
    return StructuredOutputs(**read)


def _schema(where: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{where} must be a JSON schema, or its text", FIELD)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", FIELD) from error


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a text", FIELD)
    return value


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where} must be true or false", FIELD)
    return value


def _texts(where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{where} must be a list of texts", FIELD)
    return tuple(_text(f"{where}.{place}", text) for place, text in enumerate(value))


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "json": _schema,
    "json_object": _flag,
    "regex": _text,
    "choice": _texts,
    "grammar": _text,
    "structural_tag": _schema,
    "disable_any_whitespace": _flag,
}
