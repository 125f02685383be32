"""Grammars of structural tags, in Lark's notation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.engine.structured_output.schemas.subschemas import TYPES, list_subschemas
from baton.engine.structured_output.tags.literal_syntax import SchemaText
from baton.engine.structured_output.tags.literal_values import literal_arguments
from baton.engine.structured_output.tags.rules import Rules
from baton.engine.structured_output.tags.structural_tag import Section, StructuralTag, Structure
from baton.engine.structured_output.tags.tagged_parameters import ParameterTags, TaggedArguments
from baton.engine.structured_output.tags.tokens import (
    Choice,
    Parts,
    SpecialTokens,
    text_of_length,
    text_without,
)


def lark_of_structural_tag(
    tag: StructuralTag, schema_of: SchemaText, special_ids: Mapping[str, int]
) -> str:
    """Return the grammar. `special_ids` are the special tokens, which are no text."""
    return _TagGrammar(tag, schema_of, special_ids).write()


class _TagGrammar:
    def __init__(
        self, tag: StructuralTag, schema_of: SchemaText, special_ids: Mapping[str, int]
    ) -> None:
        self._tag, self._schema_of = tag, schema_of
        self._tokens = SpecialTokens(special_ids)
        self._rules = Rules(self._tokens)

    def write(self) -> str:
        text, triggers = self._tag.text, self._tag.triggers
        marks = [each for each in text.marks if self._tokens.are_in(each)]
        spelled = [each for each in triggers if self._tokens.are_in(each)]
        never: tuple[str | Parts, ...] = (*text.never, *spelled, *marks)
        free_text = self._rules.once("TEXT", text_without(never, text.begins))
        if triggers == ("",):
            self._rules.add("start", f"{self._after_trigger('')} | {free_text}")
        else:
            found = [
                f"{self._rules.text_before(each, never)} {self._after_trigger(each)}"
                for each in triggers
            ]
            found += [self._rules.text_before(each, never) for each in marks]
            self._rules.add("start", f"({' | '.join(found)})* {free_text}")
        return self._rules.text

    def _after_trigger(self, trigger: str) -> str:
        return f"({' | '.join(map(self._section, self._tag.of_trigger(trigger)))})"

    def _section(self, section: Section) -> str:
        """Return the expression of what follows the trigger."""
        if section.stops:
            return self._stopped_section(section)
        ended = [
            (each, f"{self._value(section, each)} {self._tokens.literal(each.end)}")
            for each in section.structures
        ]
        end = self._tokens.literal(section.end)
        first = self._begun(section.begin, ended, is_joined=True)
        if section.separator is None:
            return f"({first}) {end}"
        return f"({first}) ({self._begun(section.separator, ended)})* {end}"

    def _stopped_section(self, section: Section) -> str:
        """Return the expression of a section whose last structure can lack its stop."""
        stop = f"({' | '.join(map(self._tokens.literal, section.stops))})"
        to_stop = " | ".join(self._rules.text_before(each, section.stops) for each in section.stops)
        to_end = self._rules.once("TEXT", text_without(section.stops))
        stopped, last = [], []
        for each in section.structures:
            if each.is_text:
                stopped.append((each, f"({to_stop})"))
                last.append((each, f"({to_stop} | {to_end})"))
            else:
                value = self._value(section, each)
                stopped.append((each, f"{value} {stop}"))
                last.append((each, f"{value} {stop}?"))
        separator = section.separator or ""
        more = (
            f"({self._begun(section.begin, stopped)}) ({self._begun(separator, stopped)})* "
            f"({self._begun(separator, last)})"
        )
        return f"({self._begun(section.begin, last)} | {more}) {self._tokens.literal(section.end)}"

    def _begun(
        self, before: str, rests: Sequence[tuple[Structure, str]], *, is_joined: bool = False
    ) -> str:
        """Return alternatives of the text before and structures.

        `is_joined`: the text and the begin of a structure are one lexeme, which free text that
        begins with the same characters cannot be taken for.
        """
        written = []
        for structure, rest in rests:
            first, *others = structure.begin
            joined = is_joined and isinstance(first, str)
            begin = (f"{before}{first}", *others) if joined else (before, first, *others)
            written.append(f"{self._parts(begin)} {rest}")
        return " | ".join(written)

    def _parts(self, parts: Parts) -> str:
        return " ".join(
            self._choice(part) if isinstance(part, Choice) else self._tokens.literal(part)
            for part in parts
        )

    def _choice(self, choice: Choice) -> str:
        if choice.pattern:
            return f"/{choice.pattern}/"
        return self._rules.once("choice", " | ".join(map(self._tokens.literal, choice.texts)))

    def _value(self, section: Section, structure: Structure) -> str:
        """Return the rule of a value, which all notations of a format share."""
        key = ("value", section.notation, id(structure.schema))
        return self._rules.named(
            "value", key, lambda name: [f"{name}: {self._value_of(section, structure.schema)}"]
        )

    def _value_of(self, section: Section, schema: Any) -> str:
        notation = section.notation
        if notation is None:
            return f"%json {self._schema_of(schema)}"
        check_form(schema)
        if isinstance(notation, ParameterTags):
            tags = notation

            def text_to_end(times: str) -> str:
                return self._rules.text_before(tags.end, tags.never, text=text_of_length(times))

            tagged = TaggedArguments(tags, text_to_end, self._parts, self._schema_of)
            return tagged.arguments(schema) or '""'
        return literal_arguments(schema, notation, self._rules, self._schema_of)


def check_form(schema: Any) -> None:
    """Raises ValueError with the keyword.

    llguidance checks what it compiles; the rules of other notations than JSON are made here.
    """
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
