"""Texts of structural tags in Lark's notation. Parts of a text can be special tokens. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ANY_TEXT = r"/(.|\n)*/"
ANY_LENGTH = "*"
LENGTHS = frozenset({"minLength", "maxLength"})
MAX_LENGTH = 10_000  # of a text with a length, each character of which is a state of the lexer
SPACE = r"/[\s\x1c-\x1f]*/"  # what Python strips
# Texts that a model chooses, as regular expressions.
PATTERNS = {
    "number": "[0-9]{1,4}",
    "id": "[a-zA-Z0-9]{9}",
    "name": r"[A-Za-z_]([A-Za-z0-9_.]|[^\x00-\x7f])*",  # \w would exceed the limits of masks
    "space": r"[\s\x1c-\x1f]*",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Part of a text that the model chooses: one of the texts, or a match of the pattern."""

    texts: tuple[str, ...] = ()
    pattern: str = ""


Parts = tuple[str | Choice, ...]


class SpecialTokens:
    """Special tokens of a tokenizer, which grammars do not match as text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        texts = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def are_in(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def literal(self, text: str) -> str:
        """Return a text in Lark's notation, with its special tokens by their ids."""
        return " ".join(self._written(each) for each in self._split(text))

    def before(self, text: str) -> tuple[str, str]:
        """Return what is in front of the first special token, and the rest as `literal`."""
        parts = self._split(text)
        first = parts.pop(0) if parts and parts[0] not in self._ids else ""
        return first, " ".join(map(self._written, parts))

    def _split(self, text: str) -> list[str]:
        parts = [text] if self._pattern is None else self._pattern.split(text)
        return [each for each in parts if each]

    def _written(self, part: str) -> str:
        return f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)


def text_without(
    never: Iterable[str | Parts], begins: Sequence[Parts] = (), text: str = ANY_TEXT
) -> str:
    """Return a terminal: a text that contains none of these and does not begin with the others.

    Whitespace in front of a beginning has no meaning.
    """
    excluded = []
    contained = " | ".join(dict.fromkeys(map(_terminal, never)))
    if contained:
        excluded.append(f"{ANY_TEXT} ({contained}) {ANY_TEXT}")
    if begins:
        excluded.append(f"{SPACE} ({' | '.join(map(_terminal, begins))}) {ANY_TEXT}")
    return f"({' & '.join([text, *(f'~({each})' for each in excluded)])})"


def _terminal(text: str | Parts) -> str:
    written = []
    for part in [text] if isinstance(text, str) else text:
        if isinstance(part, str):
            written.append(json.dumps(part))
        else:
            texts = [f"/{part.pattern}/"] if part.pattern else map(json.dumps, part.texts)
            written.append(f"({' | '.join(texts)})")
    return " ".join(written)


def text_of_length(times: str) -> str:
    return rf"/(.|\n){times}/"


def has_few_states(schema: Mapping[str, Any]) -> bool:
    """Return whether a string's lengths, if it has any, are short enough for the lexer."""
    return bool(max(schema.get("minLength", 0), schema.get("maxLength", 0)) <= MAX_LENGTH)


def repetition(schema: Mapping[str, Any]) -> str:
    """Return how often a character can follow in a string, in a regular expression."""
    if not has_few_states(schema):
        raise ValueError(f"its lengths must be at most {MAX_LENGTH}")
    if not LENGTHS & schema.keys():
        return ANY_LENGTH
    return f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
