"""Grammar of arguments that a model writes one by one between tags, texts without quotes. Pure.

The arguments of a schema follow in the order of its `properties`. Texts can be any that do not end
the argument; all other values are JSON. Some formats mark which of both a value is, so that JSON
can also be a text that has constraints.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.engine.structured_output.schemas.subschemas import (
    TYPES,
    kind_of,
    resolve_pointer,
)
from baton.engine.structured_output.tags.tokens import (
    ANY_LENGTH,
    LENGTHS,
    Choice,
    Parts,
    has_few_states,
    repetition,
)

ANY_NAME = r"/[^<>\n\"=&]{1,64}/"
MAX_DEPTH = 8  # of references
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
PLAIN_KEYWORDS = {*ANNOTATIONS, "type"}
COMPOUND = {"object", "array"}
NAME, ESCAPED_NAME = "$name", "$escaped"
COMBINED = "its schema cannot combine others"

WriteParts = Callable[[Parts], str]  # in Lark's notation
WriteText = Callable[[str], str]  # by the repetition of its characters
SchemaText = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Texts around one argument. The begins have `$name`, or `$escaped` as in HTML."""

    begin: str
    end: str
    never: tuple[str, ...] = ()  # texts that would end the argument elsewhere
    json: Parts = ()  # begin of a value that is JSON; empty: no other than that of a text


class TaggedArguments:
    """Writes the arguments of object schemas."""

    def __init__(
        self, tags: ParameterTags, text_to_end: WriteText, write: WriteParts, schema_of: SchemaText
    ) -> None:
        """`text_to_end` writes a text up to the end of its argument."""
        self._tags, self._text_to_end = tags, text_to_end
        self._write, self._schema_of = write, schema_of
        self._end = write((tags.end,))

    def arguments(self, schema: Any) -> str:
        """Return an expression. Raises ValueError if the schema cannot be enforced so."""
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if schema == {"type": "object"}:
            return self._any_arguments()
        if not isinstance(properties, dict) or schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
            raise ValueError(
                "arguments between tags need a schema with properties, without alternatives"
            )
        required = schema.get("required") or ()
        found = []
        for name, part in properties.items():
            try:
                self._check_name(name)
                value = _value(part, schema, has_json_tag=bool(self._tags.json))
            except ValueError as error:
                raise ValueError(f"{name!r} stands between tags, so {error}") from error
            one = self._argument(name, value, schema)
            found.append(one if name in required else f"({one})?")
        return " ".join(found)

    def _check_name(self, name: str) -> None:
        is_escaped = ESCAPED_NAME in self._tags.begin
        if not is_escaped and (not name or name != name.strip() or {"<", ">"} & set(name)):
            raise ValueError("it cannot have this name")

    def _argument(self, name: str, value: Value, root: Mapping[str, Any]) -> str:
        for constant in value.constants:
            if any(end in constant for end in (self._tags.end, *self._tags.never)):
                raise ValueError(f"{name!r} stands between tags, so it cannot be {constant!r}")
        options = [self._text_to_end(times) for times in value.texts]
        options += [f"{self._write((each,))} {self._end}" for each in value.constants]
        others = []
        if value.others:
            own = {key: root[key] for key in ("$defs", "definitions") if key in root}
            others = [f"%json {self._schema_of({'anyOf': value.others, **own})} {self._end}"]
        if not self._tags.json:
            options, others = [*options, *others], []
        both = (((self._tags.begin,), options), (self._tags.json, others))
        written = (
            f"{self._write(_named(begin, name))} ({' | '.join(each)})"
            for begin, each in both
            if each
        )
        return f"({' | '.join(written)})"

    def _any_arguments(self) -> str:
        text = f"{self._before_any_name((self._tags.begin,))} {self._text_to_end(ANY_LENGTH)}"
        if not self._tags.json:
            return f"({text})*"
        value = f"%json {self._schema_of(True)} {self._end}"
        return f"({text} | {self._before_any_name(self._tags.json)} {value})*"

    def _before_any_name(self, begin: Parts) -> str:
        """Return the begin of an argument with any name, which does not need escapes."""
        written = []
        for part in begin:
            before, name, after = _split_at_name(part) if isinstance(part, str) else (part, "", "")
            written.append(self._write((before,) if before else ()))
            written += [ANY_NAME, self._write((after,) if after else ())] if name else []
        return " ".join(written)


def _split_at_name(text: str) -> tuple[str, str, str]:
    variable = ESCAPED_NAME if ESCAPED_NAME in text else NAME
    return text.partition(variable)


def _named(begin: Parts, name: str) -> Parts:
    def with_name(text: str) -> str:
        before, variable, after = _split_at_name(text)
        written = html.escape(name) if variable == ESCAPED_NAME else name
        return f"{before}{written}{after}" if variable else text

    return tuple(part if isinstance(part, Choice) else with_name(part) for part in begin)


class Value(NamedTuple):
    texts: Sequence[str] = ()  # by the repetition of their characters
    constants: Sequence[str] = ()  # as they are written
    others: Sequence[Any] = ()  # schemas of JSON


def _value(schema: Any, root: Mapping[str, Any], *, has_json_tag: bool) -> Value:
    """Return what a value can be. Raises ValueError if it cannot be enforced."""
    if not has_json_tag:
        return _untagged_value(list(_branches(schema, root, MAX_DEPTH)))
    try:
        branches = list(_branches(schema, root, MAX_DEPTH))
    except ValueError:
        return Value(others=[schema])
    return _tagged_value(branches)


def _tagged_value(branches: Sequence[dict[str, Any]]) -> Value:
    """Return texts as such if they have no constraints, and all other values as JSON."""
    constants: list[str] = []
    others: list[Any] = []
    texts: list[str] = []
    for branch in branches:
        types = _types(branch, TYPES)
        keys = branch.keys() - PLAIN_KEYWORDS
        if keys - {"const", "enum"} and (keys - LENGTHS or not has_few_states(branch)):
            others.append(branch)
        elif "const" in branch or "enum" in branch:
            values = _constants(branch)
            constants += [each for each in values if isinstance(each, str)]
            rest = [each for each in values if not isinstance(each, str)]
            others += [{"enum": rest}] if rest else []
        else:
            texts += [repetition(branch)] if "string" in types else []
            rest = [each for each in types if each != "string"]
            others += [{"type": rest}] if rest else []
    return Value(texts, () if ANY_LENGTH in texts else constants, others)


def _untagged_value(branches: Sequence[dict[str, Any]]) -> Value:
    """Return what a value can be. Next to any text, only values that no text can be taken for."""
    [*_, last] = branches
    if len(branches) == 1 and last.get("type") == "string" and LENGTHS & last.keys():
        _check_plain(last, also=LENGTHS)
        return Value([repetition(last)])
    constants: list[Any] = []
    others: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for branch in branches:
        if "const" in branch or "enum" in branch:
            constants += _constants(branch)
            _check_plain(branch, also={"const", "enum"})
        else:
            (texts if "string" in _types(branch, ["string"]) else others).append(branch)
    if not texts:
        names = [each for each in constants if isinstance(each, str)]
        if (others or len(names) < len(constants)) and any(map(_is_json, names)):
            raise ValueError("it cannot be a text that is JSON or another value")
        written = [each if isinstance(each, str) else json.dumps(each) for each in constants]
        return Value(constants=written, others=others)
    if not all(each is None or isinstance(each, str) for each in constants):
        raise ValueError("it cannot be any text or one of some numbers")
    for branch in (*texts, *others):
        _check_plain(branch)
        if COMPOUND & set(_types(branch, ["string"])):
            raise ValueError("it cannot be any text or an object or list")
    return Value([ANY_LENGTH])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _check_plain(branch: Mapping[str, Any], also: Set[str] = frozenset()) -> None:
    more = branch.keys() - PLAIN_KEYWORDS - also
    if more:
        raise ValueError(f"a text cannot have {min(more)}")


def _types(schema: Mapping[str, Any], default: Sequence[str]) -> Sequence[str]:
    types = schema.get("type", default)
    return [types] if isinstance(types, str) else types


def _constants(branch: Mapping[str, Any]) -> list[Any]:
    types = set(_types(branch, TYPES))
    if "number" in types:
        types |= {"integer", "fraction"}
    values = [branch["const"]] if "const" in branch else branch["enum"]
    return [each for each in values if kind_of(each) in types]


def _branches(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Return the alternatives of a schema. Raises ValueError if it combines schemas."""
    if not isinstance(schema, dict) or depth == 0:
        raise ValueError(COMBINED)
    found = [name for name in ("$ref", "anyOf", "oneOf", "allOf") if name in schema]
    if not found:
        yield schema
        return
    if found[0] == "allOf" or schema.keys() - ANNOTATIONS - {found[0]}:
        raise ValueError(COMBINED)
    value = schema[found[0]]
    if found[0] == "$ref":
        yield from _branches(resolve_pointer(root, value), root, depth - 1)
        return
    branches = [each for branch in value for each in _branches(branch, root, depth - 1)]
    if found[0] == "oneOf" and not _have_disjoint_types(branches):
        raise ValueError(COMBINED)
    yield from branches


def _have_disjoint_types(branches: Sequence[Mapping[str, Any]]) -> bool:
    types = [each for branch in branches for each in _types(branch, TYPES)]
    return len(types) == len(set(types)) and not {"number", "integer"} <= set(types)
