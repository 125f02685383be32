"""Detection of schemas and grammars that no finite output satisfies.

Looks for a rule, or a part of a schema, that requires itself. Constructs that are not understood
count as finite: max_tokens ends the output in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import FIELD
from baton.engine.structured_output.schemas.subschemas import (
    list_objects,
    read_list,
    resolve_pointer,
)

Schema = Mapping[str, Any]


def check_schema_ends(schema: Schema | bool) -> None:
    """Raise InvalidRequest if no finite value satisfies the schema."""
    if isinstance(schema, bool) or _SchemaEnds(schema).holds:
        return
    raise InvalidRequest(
        f"{FIELD}.json cannot be enforced: it never ends, since a required part requires itself",
        FIELD,
    )


def check_grammar_ends(text: str) -> None:
    """Raise InvalidRequest if no finite text satisfies the grammar, in Lark or GBNF notation."""
    rules = _rules(text)
    needs = {name: rules.keys() & body for name, body in rules.items()}
    finite = _finite_names(needs, lambda name, known: _can_end(rules[name], needs[name], known))
    begin = next((name for name in ("start", "root") if name in rules), None)
    if begin is not None and begin not in finite:
        raise InvalidRequest(
            f"{FIELD}.grammar cannot be enforced: it never ends, since {begin} requires itself",
            FIELD,
        )


def _finite_names(needs: Mapping[str, Set[str]], ends: Callable[[str, Set[str]], bool]) -> set[str]:
    """Return the names that end: the least fixed point of `ends` over the dependencies."""
    users: dict[str, list[str]] = {}
    for name, needed in needs.items():
        for other in needed:
            users.setdefault(other, []).append(name)
    finite: set[str] = set()
    pending = list(needs)
    while pending:
        name = pending.pop()
        if name not in finite and ends(name, finite):
            finite.add(name)
            pending += users.get(name, ())
    return finite


class _SchemaEnds:
    """Computes whether a schema, and each schema it refers to, has a finite value."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._finite: Set[str] = set()
        refs = set(_refs(root))
        needs = {ref: set(_refs(resolve_pointer(root, ref))) for ref in refs}
        self._finite = _finite_names(needs, self._ends_if)
        self.holds = self._ends(root)

    def _ends_if(self, ref: str, finite: Set[str]) -> bool:
        self._finite = finite
        return self._ends(resolve_pointer(self._root, ref))

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and ref not in self._finite:
            return False
        return (
            all(map(self._ends, read_list(schema, "allOf")))
            and self._some_ends(read_list(schema, "anyOf"))
            and self._some_ends(read_list(schema, "oneOf"))
            and (not _is_only(schema, "object") or self._object_ends(schema))
            and (not _is_only(schema, "array") or self._array_ends(schema))
        )

    def _some_ends(self, schemas: Sequence[Any]) -> bool:
        return not schemas or any(map(self._ends, schemas))

    def _object_ends(self, schema: Schema) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        required = (name for name in read_list(schema, "required") if isinstance(name, str))
        return all(self._ends(properties.get(name)) for name in required)

    def _array_ends(self, schema: Schema) -> bool:
        min_items = schema.get("minItems", 0)
        if not isinstance(min_items, int | float) or min_items < 1:
            return True
        first = read_list(schema, "prefixItems")[: int(min_items)]
        rest_ends = len(first) >= min_items or self._ends(schema.get("items"))
        return rest_ends and all(map(self._ends, first))


def _is_only(schema: Schema, kind: str) -> bool:
    """Return whether all values of the schema are of this type."""
    return schema.get("type") in (kind, [kind]) and not {"enum", "const"} & schema.keys()


def _refs(schema: Any) -> Iterator[str]:
    """Yield the references inside a schema."""
    refs = (part.get("$ref") for part in list_objects(schema))
    return (ref for ref in refs if isinstance(ref, str))


# --- Grammars in Lark or GBNF notation ------------------------------------------------------------

_TOKENS = re.compile(
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
    """Return the tokens of each rule's body, or no rules if a token is not understood."""
    tokens: list[str] = []
    for found in _TOKENS.finditer(text):
        kind = found.lastgroup
        if kind == "other":
            return {}
        if kind != "skip":
            tokens.append('""' if kind == "text" else found.group())
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    for index, token in enumerate(tokens):
        if token in (":", "::="):
            continue
        if tokens[index + 1 : index + 2] in ([":"], ["::="]):
            body = rules.setdefault(token, [])
        else:
            body.append(token)
    return rules


def _can_end(body: Sequence[str], names: Set[str], finite: Set[str]) -> bool:
    """Return whether one of the alternatives requires only names in `finite`."""
    # For each open bracket: whether an earlier alternative ends, and whether the current one does.
    open_brackets: list[tuple[bool, bool]] = []
    some_ends, this_ends = False, True
    for index, token in enumerate(body):
        is_optional = body[index + 1 : index + 2] in (["?"], ["*"])
        if token == "(":
            open_brackets.append((some_ends, this_ends))
            some_ends, this_ends = False, True
        elif token == "|":
            some_ends, this_ends = some_ends or this_ends, True
        elif token == ")" and open_brackets:
            inner_ends = some_ends or this_ends or is_optional
            some_ends, this_ends = open_brackets.pop()
            this_ends = this_ends and inner_ends
        elif token in names and token not in finite and not is_optional:
            this_ends = False
    return some_ends or this_ends
