"""Tool calls as a Python list, `[get_weather(city="Paris"), …]`: Llama 3.2 and 4, LFM2. Pure."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.script_parser import TextBuffer, Waiting

MARKS = ("<|python_start|>", "<|python_end|>")
# Up to the first arguments, or to the end of a text that may get some.
_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:(\()|$)|$)")
_WORDS = re.compile(r"[\w\s]+")
ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
JSON_WORDS = {"true": True, "false": False, "null": None}
MAX_HEAD_CHARACTERS = 1 << 9  # in front of the first arguments
# Of a list. Each of its values but one takes a sign, and time on the event loop.
MAX_CHARACTERS = 1 << 16
MAX_SIGNS = 1 << 12


def read_pythonic_calls(source: TextBuffer, writer: CallWriter) -> Waiting[None]:
    """Read a list that is the whole answer. Calls are written at its end."""
    source.mark()
    yield from source.accept(MARKS[0])
    yield from source.choose("[")
    source.skip_space()
    text = yield from _read_list(source)
    calls = _calls_in(text.strip().removesuffix(MARKS[1]).rstrip())
    for name, arguments in calls:
        writer.call(name, arguments)
    if not calls:
        writer.fail_call("", source)
    yield from source.read_to((), writer.text)


@dataclass(frozen=True, slots=True)
class MarkedLists:
    """Script of lists between marks, in an answer that has other texts, too."""

    begin: str
    end: str

    def __call__(self, source: TextBuffer, writer: CallWriter) -> Waiting[None]:
        while not source.is_at_end:
            found = yield from source.read_to((self.begin,), writer.text)
            if not found:
                continue
            source.mark()
            text = yield from source.read_until(self.end)
            calls = _calls_in(text.strip()) if text and len(text) <= MAX_CHARACTERS else []
            for name, arguments in calls:
                writer.call(name, arguments)
            if not calls:
                writer.fail_call(self.begin, source)


def _read_list(source: TextBuffer) -> Waiting[str]:
    """Read the whole answer, while it can be a list of calls. Returns "" if it cannot."""
    parts: list[str] = []
    num_characters, has_begun = 0, False
    while num_characters <= (MAX_CHARACTERS if has_begun else MAX_HEAD_CHARACTERS):
        parts.append(source.take(len(source.buffer)))
        num_characters += len(parts[-1])
        if not has_begun:
            beginning = _BEGINNING.match("".join(parts))
            if beginning is None:
                return ""
            has_begun = beginning[1] is not None
        if not (yield from source.more()):
            return "".join(parts)
    return ""


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls; none if the text is anything else."""
    if len(_WORDS.sub("", text)) > MAX_SIGNS:
        return []
    try:
        parsed = ast.parse(text, mode="eval").body
        if not isinstance(parsed, ast.List):
            return []
        return [_call(node) for node in parsed.elts]
    except ERRORS:
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no argument")
        arguments[keyword.arg] = _value(keyword.value)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return _name(node.func), written


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("not the name of a function")
    return ".".join((node.id, *reversed(parts)))


def _value(node: ast.expr | None) -> Any:
    """Return the value of a literal, in which words of JSON stand for those of Python."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {_value(key): _value(each) for key, each in pairs}
        case ast.Name() if node.id in JSON_WORDS:
            return JSON_WORDS[node.id]
        case ast.UnaryOp():  # a sign in front of a number
            return ast.literal_eval(node)
    raise ValueError("not a literal")
