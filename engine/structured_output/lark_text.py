"""Check of clients' grammars in Lark notation: costly operators and schemas inside are refused.

Pure. Tokens are those of llguidance. What is not one of them is passed on, for its error message,
only if nothing after it could have been refused.
"""

from __future__ import annotations

import re

_TOKENS = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t]+)
    |(?P<json>%json)
    |(?P<text>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<[^<>\s]+>)
    |(?P<number>[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<other>%[a-z]+|->|::|[!?]?[_A-Za-z][\w-]*|@[\w-]+|[:,.(){}\[\]|=+*?]|\r?\n)
    |(?P<costly>[&~])""",
    re.VERBOSE,
)
_REFUSED = re.compile(r"%json|[&~]")
COSTLY = (
    "the operator {} of expressions is not supported, since it can take unlimited time: write one "
    "expression that matches the same"
)
SCHEMA = "a schema in a grammar is not supported: send it as json, or in a structural_tag"


def reason_to_refuse(text: str) -> str | None:
    """Return the line and what is not supported there."""
    end = 0
    while end < len(text):
        begin, found = end, _TOKENS.match(text, end)
        if found is None:
            is_harmless = _REFUSED.search(text, begin) is None
            return None if is_harmless else _at(text, begin, f"{text[begin]!r} is not Lark")
        end = found.end()
        if found["json"]:
            return _at(text, begin, SCHEMA)
        if found["costly"] and not (found["costly"] == "~" and _is_number_next(text, end)):
            return _at(text, begin, COSTLY.format(found["costly"]))
    return None


def _is_number_next(text: str, end: int) -> bool:
    """Return whether `~` is a repetition, such as `"a" ~ 3..5`, rather than a negation."""
    while (found := _TOKENS.match(text, end)) is not None and found["skip"]:
        end = found.end()
    return found is not None and found["number"] is not None


def _at(text: str, end: int, reason: str) -> str:
    line = text.count("\n", 0, end) + 1
    return f"line {line}: {reason}"
