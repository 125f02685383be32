"""Tool calls as a Python list, `[get_weather(city="Paris"), …]`: Llama 3.2 and 4. Pure."""

from __future__ import annotations

import ast
import json
import re

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.script_parser import TextSource, Waiting

MARKS = ("<|python_start|>", "<|python_end|>")
_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|$)|$)")
ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
MAX_CHARACTERS = 1 << 16  # of a list


def read_pythonic_calls(source: TextSource, writer: CallWriter) -> Waiting[None]:
    """Read a list that is the whole answer. Calls are written at its end."""
    source.mark()
    yield from source.accept(MARKS[0])
    yield from source.choose("[")
    source.skip_space()
    text = ""
    while _BEGINNING.match(source.buffer) and len(source.buffer) <= MAX_CHARACTERS:
        if not (yield from source.more()):
            text = source.take(len(source.buffer))
            break
    calls = _calls_in(text.strip().removesuffix(MARKS[1]).rstrip())
    for name, arguments in calls:
        writer.call(name, arguments)
    if not calls:
        writer.fail_call("", source)
    yield from source.read_to((), writer.text)


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls; none if the text is anything else."""
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
        arguments[keyword.arg] = ast.literal_eval(_without_json_words(keyword.value))
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return ast.unparse(node.func), written


def _without_json_words(value: ast.expr) -> ast.expr:
    """Return the value with `true`, `false` and `null` as Python writes them."""
    words = {"true": True, "false": False, "null": None}
    for node in ast.walk(value):
        for field, child in ast.iter_fields(node):
            children = child if isinstance(child, list) else [child]
            for index, each in enumerate(children):
                if isinstance(each, ast.Name) and each.id in words:
                    constant = ast.Constant(words[each.id])
                    if isinstance(child, list):
                        child[index] = constant
                    else:
                        setattr(node, field, constant)
    if isinstance(value, ast.Name) and value.id in words:
        return ast.Constant(words[value.id])
    return value
