"""Syntax of values in other notations than JSON: Python's literals, and Gemma's values. Pure."""

from __future__ import annotations

import json
import keyword
import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from baton.engine.structured_output.tags.rules import Rules
from baton.engine.structured_output.tags.tokens import (
    ANY_LENGTH,
    LENGTHS,
    repetition,
    text_of_length,
)

MAX_NUMBER = 10**18  # where no other bound is set, so that a number has few digits
NUMBER_KEYWORDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)


class SchemaText(Protocol):
    def __call__(self, schema: Any, *, escapes: str = "") -> str:
        """Return a schema that llguidance compiles. `escapes` are the letters of escapes."""
        ...


class Syntax(Protocol):
    """Expressions of Lark for the parts of values. Methods raise ValueError with the reason."""

    name: str
    separator: str
    words: Mapping[str, str]

    def begin_of_arguments(self) -> str: ...

    def end_of_arguments(self) -> str: ...

    def argument(self, name: str) -> str:
        """Return the name of an argument, and what is between it and the value."""
        ...

    def any_argument(self, taken: Collection[str]) -> str: ...

    def key(self, name: str) -> str: ...

    def any_key(self, taken: Collection[str]) -> str: ...

    def any_string(self) -> str: ...

    def string(self, text: str) -> str: ...

    def constrained_string(self, schema: Mapping[str, Any]) -> str: ...

    def number(self, schema: Mapping[str, Any]) -> str: ...


_LETTER_ESCAPES = 'nrbtf\\"'
_CODE = "u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"  # without surrogates
_ESCAPE = rf"\\(['\"\\nrtbf]|{_CODE})"
_KEYWORDS = tuple(sorted(keyword.kwlist))


class PythonSyntax:
    """Literals of Python as arguments of a call, `a=1, b="x"`."""

    name = "Python's notation"
    separator = "/, ?/"
    words: Mapping[str, str] = {
        "true": '("True" | "true")',
        "false": '("False" | "false")',
        "null": '("None" | "null")',
    }

    def __init__(self, rules: Rules, schema_of: SchemaText) -> None:
        self._rules, self._schema_of = rules, schema_of

    def begin_of_arguments(self) -> str:
        return ""

    def end_of_arguments(self) -> str:
        return ""

    def argument(self, name: str) -> str:
        is_plain = name.isidentifier() and unicodedata.normalize("NFKC", name) == name
        if not is_plain or keyword.iskeyword(name):
            raise ValueError("it is no name of an argument")
        return json.dumps(f"{name}=")

    def any_argument(self, taken: Collection[str]) -> str:
        no_names = " | ".join(map(json.dumps, sorted({*taken, *_KEYWORDS})))
        return self._rules.once("NAME", f'(/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~({no_names})) "="')

    def key(self, name: str) -> str:
        return f"{self.string(name)} /: ?/"

    def any_key(self, taken: Collection[str]) -> str:
        name = r"/[^\"'\\\x00-\x1f\x7f]{0,64}/"
        if taken:
            name = f"({name} & ~({' | '.join(map(json.dumps, sorted(taken)))}))"
        quoted = (f"{quote} {name} {quote}" for quote in (r'"\""', '"\'"'))
        return f"{self._rules.once('KEY', ' | '.join(quoted))} /: ?/"

    def any_string(self) -> str:
        return self._string(ANY_LENGTH)

    def _string(self, times: str) -> str:
        texts = (
            rf"{quote}([^{quote}\\\x00-\x1f\x7f]|{_ESCAPE}){times}{quote}" for quote in ('"', "'")
        )
        return self._rules.once("STRING", f"/{'|'.join(texts)}/")

    def string(self, text: str) -> str:
        written = dict.fromkeys((json.dumps(text, ensure_ascii=False), repr(text)))
        return f"({' | '.join(map(json.dumps, written))})"

    def constrained_string(self, schema: Mapping[str, Any]) -> str:
        if schema.keys() <= {"type", *LENGTHS}:
            return self._string(repetition(schema))
        return self._rules.once("leaf", f"%json {self._schema_of(schema, escapes=_LETTER_ESCAPES)}")

    def number(self, schema: Mapping[str, Any]) -> str:
        """A number has bounds, since Python reads no infinity and no thousands of digits."""
        if not schema.keys() & NUMBER_KEYWORDS:
            fraction = (
                "" if schema["type"] == "integer" else r"(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"
            )
            return self._rules.once("NUMBER", f"/-?(0|[1-9][0-9]{{0,17}}){fraction}/")
        bounded = dict(schema)
        for bound, limit in (("minimum", -MAX_NUMBER), ("maximum", MAX_NUMBER)):
            given = [bounded.get(each) for each in (bound, f"exclusive{bound.title()}")]
            if any(each is not None and abs(each) > MAX_NUMBER for each in given):
                raise ValueError(f"its {bound} cannot be beyond {MAX_NUMBER}")
            if given == [None, None]:
                bounded[bound] = limit
        return self._rules.once("leaf", f"%json {self._schema_of(bounded)}")


_BARE_KEY = re.compile(r"[\w$.-]+(?: [\w$.-]+)*")


class QuotedSyntax:
    """Values of Gemma, `{key:value}`. Strings are any text between quotes, without escapes."""

    name = "Gemma's notation"
    separator = '","'
    words: Mapping[str, str] = {"true": '"true"', "false": '"false"', "null": '"null"'}

    def __init__(self, quote: str, rules: Rules, schema_of: SchemaText) -> None:
        self._quote, self._rules, self._schema_of = quote, rules, schema_of

    def begin_of_arguments(self) -> str:
        return '"{"'

    def end_of_arguments(self) -> str:
        return '"}"'

    def argument(self, name: str) -> str:
        return self.key(name)

    def any_argument(self, taken: Collection[str]) -> str:
        return self.any_key(taken)

    def key(self, name: str) -> str:
        return json.dumps(f"{name}:") if _BARE_KEY.fullmatch(name) else f'{self.string(name)} ":"'

    def any_key(self, taken: Collection[str]) -> str:
        name = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
        if taken:
            name = f"({name} & ~({' | '.join(map(json.dumps, sorted(taken)))}))"
        return self._rules.once("KEY", f'{name} ":"')

    def any_string(self) -> str:
        return f"{self._rules.tokens.literal(self._quote)} {self._rules.text_before(self._quote)}"

    def string(self, text: str) -> str:
        if self._quote in text:
            raise ValueError(f"it cannot be {text!r}")
        quote = self._rules.tokens.literal(self._quote)
        return f"({quote} {json.dumps(text)} {quote})" if text else f"({quote} {quote})"

    def constrained_string(self, schema: Mapping[str, Any]) -> str:
        others = schema.keys() - {"type", *LENGTHS}
        if others:
            raise ValueError(f"a text cannot have {min(others)}")
        text = self._rules.text_before(self._quote, text=text_of_length(repetition(schema)))
        return f"{self._rules.tokens.literal(self._quote)} {text}"

    def number(self, schema: Mapping[str, Any]) -> str:
        return self._rules.once("leaf", f"%json {self._schema_of(schema)}")
