"""Regular expressions for the strings that a schema forbids. Pure.

The expressions are anchored and use only what JSON schema patterns of llguidance support.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# The expressions grow with the texts, and nest once per character.
MAX_CHARACTERS = 2048
MAX_TEXT_CHARACTERS = 64
ANYTHING = "(?s:.)*"
# Classes without nested classes, ranges of escapes and set operations, whose dialects differ.
_CLASS = re.compile(r"\^\[(\^?)((?:[^\[\]\\^&~]|\\[-.,*\\{}()\[\]^$+?|/s])+)\]([+*])\$")
_TEXTS = re.compile(r"\^\(?(?:\?:)?([\w \-]+(?:\|[\w \-]+)*)(\)?)(\$?)")


def pattern_of_others(texts: Collection[str]) -> str | None:
    """Return a pattern of all strings except `texts`, or None if it would be too large."""
    return _complement(texts, are_prefixes=False)


def pattern_of_mismatches(pattern: str) -> str | None:
    """Return a pattern of all strings that do not match, or None if the pattern is not understood.

    Understood are repeated classes and the alternatives of texts, such as `^[a-z]+$`, `^(a|b)$`.
    """
    is_class = _CLASS.fullmatch(pattern)
    if is_class is not None:
        negated, characters, repeat = is_class.groups()
        other = f"[{characters}]" if negated else f"[^{characters}]"
        return other if repeat == "*" else f"^$|{other}"
    is_texts = _TEXTS.fullmatch(pattern)
    if is_texts is None or ("(" in pattern) != bool(is_texts[2]):
        return None
    texts = is_texts[1].split("|")
    # Without brackets, each anchor belongs to one alternative.
    if len(texts) > 1 and not is_texts[2]:
        return None
    return _complement(texts, are_prefixes=not is_texts[3])


def _complement(texts: Collection[str], *, are_prefixes: bool) -> str | None:
    if max(map(len, texts), default=0) > MAX_TEXT_CHARACTERS or (
        sum(map(len, texts)) > MAX_CHARACTERS
    ):
        return None
    return f"^{_others(texts, are_prefixes)}$"


def _others(texts: Collection[str], are_prefixes: bool) -> str:
    """Return an expression of all strings that are none of `texts`, or begin with none."""
    ends_here = "" in texts
    if ends_here and are_prefixes:
        return "[^\\s\\S]"
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    if not by_first:
        return f"(?s:.){ANYTHING}" if ends_here else ANYTHING
    escaped = {first: f"\\x{{{ord(first):x}}}" for first in by_first}
    ways = [f"[^{''.join(escaped.values())}]{ANYTHING}"]
    for first, rests in by_first.items():
        if not (are_prefixes and "" in rests):
            ways.append(escaped[first] + _others(rests, are_prefixes))
    return f"(?:{'|'.join(ways)}){'' if ends_here else '?'}"
