"""Reasons for clients, from llguidance's error texts. Pure.

llguidance quotes the text that Baton generates, names its own options, and counts lines in that
text. A reason names the cause in the client's schema or grammar and, where there is one, the
remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from baton.core.errors import InvalidRequest

TOO_DEEP = "it is nested too deeply"
PANIC = "panic:"  # prefix of llguidance's errors for panics that it caught
MAX_REASON_CHARACTERS = 400
# Lines that Baton puts in front of a client's grammar.
NUM_HEADER_LINES = 1


class TemporaryRefusal(InvalidRequest):
    """Refusal that another compilation of the same grammar may not repeat. It is not cached."""


_LISTING = re.compile(r"\n\s*\d+ \| ")
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_CONTEXTS = (
    "failed to compile JSON schema: ",
    re.compile(r'invalid regex ".*" \(in regex\): (?=regex parse error)', re.DOTALL),
)
_CANNOT_BE_USED = "its regular expression cannot be used"


def _unsupported_keywords(found: re.Match[str]) -> str:
    *others, last = re.findall(r'"(.*?)"', found[1])
    names = f"{', '.join(others)} and {last}" if others else last
    subject = f"the keywords {names} are" if others else f"the keyword {names} is"
    return (
        f"{subject} not supported: leave {'them' if others else 'it'} out, or describe what is "
        "allowed instead, with type, enum, anyOf or pattern"
    )


_REASONS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), reason)
    for pattern, reason in (
        (r"Unimplemented keys: \[(.*)\]", _unsupported_keywords),
        (
            r"oneOf constraints are not supported.*",
            (
                "oneOf is supported only if no value can match two of its branches, which must "
                "differ by a type, const, enum or required property: use anyOf"
            ),
        ),
        (
            r"min/maxProperties only supported.*",
            (
                "minProperties and maxProperties are supported only if all properties are "
                "required: leave them out"
            ),
        ),
        (
            r"circular references with sibling keys.*",
            "a $ref to a schema that contains it cannot have other keywords next to it",
        ),
        (r"Resource '(.*)' is not present.*", r"\1 is not fetched: put that schema into $defs"),
        (r"Pointer '(.*)' does not exist", r"$ref names #\1, which does not exist"),
        (
            r"Unsatisfiable schema: Regex is empty.*",
            "no text matches its pattern, format and lengths together",
        ),
        (r"Unsatisfiable schema: (.*)", r"no value matches it: \1"),
        (r"regex parse error:.*\nerror: (.*)", rf"{_CANNOT_BE_USED}: \1"),
        (
            r"lookarounds not supported yet.*",
            (
                f"{_CANNOT_BE_USED}: word boundaries, look-around and anchors inside of it are not "
                "supported"
            ),
        ),
        (r'failed to parse "%json": recursion limit exceeded.*', TOO_DEEP),
        (r"lark grammar too deeply nested.*", TOO_DEEP),
        (r'failed to parse "%json": (.*)', r"a schema in it is not JSON: \1"),
        (r"NoExtensionBias", "no answer can fit it"),
        (r"panic:.*", "the compiler failed on it: make it simpler"),
        (r"Expected f64 for (.*)", r"expected a number for \1"),
        (r"Value for 'multipleOf' has too many digits.*", "its multipleOf has too many digits"),
        (
            (
                r"(?:parser error|lexer error): .*(?:max is|too many|too big|fuel|limit).*"
                r"|initial lexer configuration .*|grammar size .*|schema too large.*|too many .*"
            ),
            "it exceeds the compiler's limits: make it simpler",
        ),
        (
            r"(?:lexer precomputation failed|unable to determine if regex is empty).*",
            "its expressions exceed the compiler's limits: use shorter ones with fewer repetitions",
        ),
    )
)


def reason_of(text: str, *, has_lines: bool = False) -> str:
    """Return the reason in an error text. `has_lines`: positions are those of a client's lines."""
    text = _LISTING.split(text, maxsplit=1)[0].removesuffix("<non-verbose/>").strip()
    position = _POSITION.match(text)
    where = ""
    if position is not None:
        text = text[position.end() :]
        line = int(position[1]) - NUM_HEADER_LINES
        where = f"line {line}, column {position[2]}: " if has_lines else ""
    for context in _CONTEXTS:
        text = text.removeprefix(context) if isinstance(context, str) else context.sub("", text, 1)
    return where + _shorten(_translate(text))


def _translate(text: str) -> str:
    for pattern, reason in _REASONS:
        found = pattern.fullmatch(text)
        if found is not None:
            return reason(found) if callable(reason) else found.expand(reason)
    return text


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    limit = MAX_REASON_CHARACTERS
    return text if len(text) <= limit else f"{text[:limit]}…"
