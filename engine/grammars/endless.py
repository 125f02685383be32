"""Grammars that no answer could ever come to the end of are found before one is begun.

What is looked for is a rule, or a part of a schema, that cannot end without having ended first.
Whatever is not understood here is taken to end: max_tokens ends it in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from engine.errors import InvalidRequest
from engine.structured_outputs import FIELD

Schema = Mapping[str, Any]


def check_schema_ends(schema: Schema | bool) -> None:
    """Raises InvalidRequest."""
    if isinstance(schema, bool) or _SchemaEnds(schema).holds:
        return
    raise InvalidRequest(
        f"{FIELD}.json cannot be kept to: it never ends, since what it requires requires itself",
        FIELD,
    )


def check_grammar_ends(text: str) -> None:
    """Raises InvalidRequest."""
    rules = _rules(text)
    needs = {name: rules.keys() & body for name, body in rules.items()}
    ending = _those_that_end(needs, lambda name, known: _can_end(rules[name], needs[name], known))
    begin = next((name for name in ("start", "root") if name in rules), None)
    if begin is not None and begin not in ending:
        raise InvalidRequest(
            f"{FIELD}.grammar cannot be kept to: it never ends, since {begin} needs itself", FIELD
        )


def _those_that_end(
    needs: Mapping[str, Set[str]], ends: Callable[[str, Set[str]], bool]
) -> set[str]:
    """Found one after the other, beginning with those that need none of the others."""
    users: dict[str, list[str]] = {}
    for name, needed in needs.items():
        for other in needed:
            users.setdefault(other, []).append(name)
    ending: set[str] = set()
    to_look_at = list(needs)
    while to_look_at:
        name = to_look_at.pop()
        if name not in ending and ends(name, ending):
            ending.add(name)
            to_look_at += users.get(name, ())
    return ending


class _SchemaEnds:
    """Which schemas that are referred to have a value of finite size."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._ending: Set[str] = set()
        refs = set(_refs(root))
        needs = {ref: set(_refs(self._at(ref))) for ref in refs}
        self._ending = _those_that_end(needs, self._ends_if)
        self.holds = self._ends(root)

    def _ends_if(self, ref: str, ending: Set[str]) -> bool:
        self._ending = ending
        return self._ends(self._at(ref))

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and ref not in self._ending:
            return False
        return (
            all(map(self._ends, _listed(schema, "allOf")))
            and self._some_ends(_listed(schema, "anyOf"))
            and self._some_ends(_listed(schema, "oneOf"))
            and (not _is_only(schema, "object") or self._object_ends(schema))
            and (not _is_only(schema, "array") or self._array_ends(schema))
        )

    def _some_ends(self, schemas: Sequence[Any]) -> bool:
        return not schemas or any(map(self._ends, schemas))

    def _object_ends(self, schema: Schema) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        required = (name for name in _listed(schema, "required") if isinstance(name, str))
        return all(self._ends(properties.get(name)) for name in required)

    def _array_ends(self, schema: Schema) -> bool:
        least = schema.get("minItems", 0)
        if not isinstance(least, int | float) or least < 1:
            return True
        first = _listed(schema, "prefixItems")[: int(least)]
        rest_ends = len(first) >= least or self._ends(schema.get("items"))
        return rest_ends and all(map(self._ends, first))

    def _at(self, ref: str) -> Any:
        place: Any = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(place, Mapping) or name not in place:
                return None
            place = place[name]
        return place


def _is_only(schema: Schema, kind: str) -> bool:
    """Whether its values are of that kind and of no other."""
    return schema.get("type") in (kind, [kind]) and not {"enum", "const"} & schema.keys()


def _listed(schema: Schema, name: str) -> Sequence[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else ()


def _refs(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        if isinstance(ref, str):
            yield ref
    inner = schema.values() if isinstance(schema, Mapping) else schema
    for each in inner if isinstance(schema, Mapping | list) else ():
        yield from _refs(each)


# --- Grammars, in Lark's notation or in GBNF ------------------------------------------------------

_PARTS = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*|[ \t\r]+|\n)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?![/*])(?:[^/\\\n]|\\.)+/[a-z]*|\[(?:[^\]\\\n]|\\.)*\]|<[^>\n]*>)
    |(?P<defines>::=|:)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<sign>[()|?*+])
    |(?P<repeat>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?|\{\d+(?:,\d*)?\})
    |(?P<other>.)""",
    re.VERBOSE,
)


def _rules(text: str) -> dict[str, list[str]]:
    """Each rule's parts. None at all unless every part is understood."""
    parts: list[str] = []
    for found in _PARTS.finditer(text):
        kind = found.lastgroup
        if kind == "other":
            return {}
        if kind != "skip":
            parts.append('""' if kind == "text" else found.group())
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    for place, part in enumerate(parts):
        if part in (":", "::="):
            continue
        if parts[place + 1 : place + 2] in ([":"], ["::="]):
            body = rules.setdefault(part, [])
        else:
            body.append(part)
    return rules


def _can_end(body: Sequence[str], names: Set[str], ending: Set[str]) -> bool:
    """Whether one of its alternatives needs only what ends."""
    # For each bracket that is open: whether an alternative before this one ends, and this one.
    open_ones: list[tuple[bool, bool]] = []
    some_ends, this_ends = False, True
    for place, part in enumerate(body):
        is_optional = body[place + 1 : place + 2] in (["?"], ["*"])
        if part == "(":
            open_ones.append((some_ends, this_ends))
            some_ends, this_ends = False, True
        elif part == "|":
            some_ends, this_ends = some_ends or this_ends, True
        elif part == ")" and open_ones:
            inner_ends = some_ends or this_ends or is_optional
            some_ends, this_ends = open_ones.pop()
            this_ends = this_ends and inner_ends
        elif part in names and part not in ending and not is_optional:
            this_ends = False
    return some_ends or this_ends
