"""Tool calls as JSON objects, `{"name": …, "arguments": {…}}`. Pure.

Alone, in a list or in a row, with marks around: Hermes, Qwen, Llama, Granite, Mistral, Phi, and
Cohere's Command models, which write `tool_name` and `parameters`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import partial
from math import isfinite
from typing import Any, NoReturn

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.scanning import JsonScan, find_first, held_length
from baton.router.text_events.script_parser import TextBuffer, Waiting

MAX_HEAD_CHARACTERS = 1 << 10  # of a call whose arguments are written as they arrive
NO_JSON = (ValueError, RecursionError)
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
# Up to the first character of the arguments.
_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:id|type|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*'
    r'"(?:tool_)?name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
MAX_DIGITS = 4000  # of all integers that a text gets in place of exponents; Python refuses 4,300
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, None if it is none or not strict JSON."""
    try:
        value = strict_loads(text)
    except NO_JSON:
        return None
    return value if isinstance(value, dict) else None


def call_from(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call, None if the value is no call."""
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = next((value[key] for key in NAMES if key in value), None)
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, arguments


class ObjectCall:
    """A call as one JSON object, `{"name": …, "arguments": {…}}`, written as it arrives.

    An end mark inside a JSON string belongs to the string.
    """

    def __init__(
        self, writer: CallWriter, end: str = "", *, needs_known_name: bool = False
    ) -> None:
        self._writer, self._ends = writer, (end,) if end else ()
        self._needs_known_name = needs_known_name  # to be sure of a call before its end
        self._parts: list[str] = []
        self._num_characters = 0
        self._scan = JsonScan()
        self._arguments: JsonScan | None = None  # None: they have not begun
        self._has_begun = False
        self.is_whole = False

    def read(self, source: TextBuffer, *, counts_marks: bool = False) -> Waiting[None]:
        """Read the object. `counts_marks`: an end mark inside a string ends it, too."""
        while True:
            index, found = find_first(source.buffer, self._ends)
            if not found:
                held = 0 if source.is_closed else held_length(source.buffer, self._ends)
                index = len(source.buffer) - held
            end = self._scan.scan(source.buffer[:index])
            self._add(source.take(index if end is None else end))
            if end is not None:
                self._finish()
                return
            if found and (counts_marks or not self._scan.is_in_string):
                return
            if found:
                self._scan.scan(found)
                self._add(source.take(len(found)))
            elif not (yield from source.more()):
                return

    def _add(self, text: str) -> None:
        self._parts.append(text)
        if self._has_begun:
            self._write(text)
            return
        self._num_characters += len(text)
        if self._num_characters > MAX_HEAD_CHARACTERS and len(self._parts) > 1:
            return
        head = _HEAD.match("".join(self._parts))
        name = None if head is None else _name_in(head[1])
        is_sure = not self._needs_known_name or name in self._writer.names
        if head is not None and name is not None and is_sure:
            self._has_begun, self._arguments = True, JsonScan()
            self._writer.begin_call(name)
            self._write(head.string[head.end() :])

    def _write(self, text: str) -> None:
        if self._arguments is None or not text:
            return  # what follows the arguments
        end = self._arguments.scan(text)
        self._writer.arguments(text if end is None else text[:end])
        if end is not None:
            self._arguments = None

    def _finish(self) -> None:
        text = "".join(self._parts)
        call = call_from(parse_object(text))
        self.is_whole = call is not None
        if call is None:
            return
        if self._has_begun:
            self._writer.end_call()
            return
        name, arguments = call
        head = _HEAD.match(text)
        if head is None:
            self._writer.call(name, json.dumps(arguments, ensure_ascii=False))
            return
        written = text[head.end() :]
        self._writer.call(name, written[: JsonScan().scan(written)])


def _name_in(quoted: str) -> str | None:
    try:
        name = json.loads(quoted)
        name.encode()
    except ValueError:
        return None
    return str(name)


@dataclass(frozen=True, slots=True)
class MarkedObjects:
    """Objects, or a list of them, between marks."""

    begins: tuple[str, ...]
    end: str = ""

    # Marks around other parts of an answer, which are left out, and what writes the text after.
    others: Mapping[str, Callable[[CallWriter, str], None]] = field(default_factory=dict)

    def __call__(self, source: TextBuffer, writer: CallWriter) -> Waiting[None]:
        counts_marks = False
        write: Callable[[CallWriter, str], None] = CallWriter.text
        while not source.is_at_end:
            marks = (*self.begins, *self.others)
            found = yield from source.read_to(marks, partial(write, writer))
            write = self.others.get(found, CallWriter.text)
            if found not in self.begins:
                continue
            source.mark()
            is_whole = yield from read_objects(source, writer, self.end, counts_marks=counts_marks)
            if is_whole:
                if self.end:
                    yield from source.accept(self.end)
                continue
            rest = source.text_since_mark.partition(self.end)[2] if self.end else ""
            if rest:
                counts_marks = True  # parsing the rest again and again would be slow
                source.put_back(rest)
            writer.fail_call(found, source)


def read_objects(
    source: TextBuffer, writer: CallWriter, end: str = "", *, counts_marks: bool = False
) -> Waiting[bool]:
    """Read an object or a list of them. Returns False if what is read since a mark is no call."""
    is_list = bool((yield from source.accept("[")))
    while True:
        call = ObjectCall(writer, end)
        yield from call.read(source, counts_marks=counts_marks)
        if not call.is_whole:
            return False
        source.mark()
        if not is_list:
            return True
        sign = yield from source.accept(",", "]")
        if sign != ",":
            return True


PYTHON_TAG = "<|python_tag|>"


def read_llama_calls(source: TextBuffer, writer: CallWriter) -> Waiting[None]:
    """Read calls that are the whole answer, or follow `<|python_tag|>`, with `;` between."""
    found = ""
    while True:
        source.mark()
        is_tagged = bool(found) or bool((yield from source.accept(PYTHON_TAG)))
        if (yield from source.choose("{")):
            yield from _read_row(source, writer, found)
        elif is_tagged:
            writer.text(found + source.text_since_mark)
        found = yield from source.read_to((PYTHON_TAG,), writer.text)
        if not found:
            return


def _read_row(source: TextBuffer, writer: CallWriter, tag: str) -> Waiting[None]:
    while True:
        call = ObjectCall(writer, needs_known_name=True)
        yield from call.read(source)
        if not call.is_whole:
            writer.fail_call(tag, source)
            return
        tag = ""
        source.mark()
        sign = yield from source.choose(";", "{", ",")
        if not sign:
            return
        if sign != "{":
            yield from source.accept(sign)
        if not (yield from source.choose("{")):
            writer.text(source.text_since_mark)
            return
        source.skip_space()
        source.mark()


def strict_loads(text: str) -> Any:
    """Parse JSON without NaN, infinities and lone surrogates. Raises ValueError.

    Numbers beyond doubles, such as 1e999, become integers.
    """
    value = json.loads(text, parse_constant=_refuse, parse_float=_Numbers().read)
    text.encode()  # raises for a lone surrogate
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # likewise
    return value


def has_only_finite_numbers(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


class _Numbers:
    """Reads the numbers of one text."""

    def __init__(self) -> None:
        self._num_digits_left = MAX_DIGITS

    def read(self, text: str) -> float | int:
        number = float(text)
        if isfinite(number):
            return number
        try:
            exact = Decimal(text)
        except InvalidOperation:  # an exponent of 19 digits
            raise ValueError(f"{text} is too large") from None
        self._num_digits_left -= exact.adjusted()
        if self._num_digits_left <= 0:
            raise ValueError(f"{text} is too large")
        return int(exact)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
