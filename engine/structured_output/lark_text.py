"""Grammars of clients in Lark notation: schemas inside are rewritten, costly operators refused.

Pure. Tokens are those of llguidance. What is not one of them is passed on, for its error message,
only if nothing after it could have been a schema or an operator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_TOKENS = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t]+)
    |(?P<json>%json)
    |(?P<regex>%regex)
    |(?P<text>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<[^<>\s]+>)
    |(?P<number>[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<other>%[a-z]+|->|::|[!?]?[_A-Za-z][\w-]*|@[\w-]+|[:,.(){}\[\]|=+*?]|\r?\n)
    |(?P<costly>[&~])""",
    re.VERBOSE,
)
_BEFORE_JSON = re.compile(r"[ \t\r\n]*")
_NEEDS_REWRITING = re.compile(r"%json|[&~]")
COSTLY = (
    "the operator {} of expressions is not supported, since it can take unlimited time: write one "
    "expression that matches the same"
)


class LarkRefused(Exception):
    """The grammar is refused."""


def rewrite_lark(text: str, rewrite_schema: Callable[[str], str]) -> str:
    """Return the grammar with each JSON schema after `%json` rewritten. Raises LarkRefused."""
    parts: list[str] = []
    end = 0
    while end < len(text):
        found = _TOKENS.match(text, end)
        if found is None:
            if _NEEDS_REWRITING.search(text, end):
                raise LarkRefused(f"line {_line(text, end)}: {text[end : end + 1]!r} is not Lark")
            parts.append(text[end:])
            break
        end = found.end()
        if found["costly"] and not (found["costly"] == "~" and _is_number_next(text, end)):
            raise LarkRefused(f"line {_line(text, end)}: {COSTLY.format(found['costly'])}")
        parts.append(found[0])
        if found["json"] or found["regex"]:
            begin = end
            end = _end_of_json(text, begin)
            given = text[begin:end]
            parts.append(_rewritten(given, rewrite_schema) if found["json"] else given)
    return "".join(parts)


def _rewritten(given: str, rewrite_schema: Callable[[str], str]) -> str:
    schema = rewrite_schema(given)
    # Lines of errors stay those of the client.
    lines = "\n" * given.count("\n")
    return f" {schema[0]}{lines}{schema[1:]}"


def _end_of_json(text: str, begin: int) -> int:
    blank = _BEFORE_JSON.match(text, begin)
    begin = blank.end() if blank is not None else begin
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except RecursionError:
        raise LarkRefused("it is nested too deeply") from None
    except ValueError as error:
        where = f"line {_line(text, begin)}"
        raise LarkRefused(f"{where}: a schema in it is not JSON: {error}") from None


def _is_number_next(text: str, end: int) -> bool:
    """Return whether `~` is a repetition, such as `"a" ~ 3..5`, rather than a negation."""
    while (found := _TOKENS.match(text, end)) is not None and found["skip"]:
        end = found.end()
    return found is not None and found["number"] is not None


def _line(text: str, end: int) -> int:
    return text.count("\n", 0, end) + 1
