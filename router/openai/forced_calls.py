"""Tool calls read out of an answer whose form is made of the tools' parameters. Pure.

Arguments are passed on as they come, a call's name when it is whole.
"""

from __future__ import annotations

import json
import re

from router.openai.json_scan import JsonScan
from router.openai.parsing import NOTHING, Delta, ToolCall

# Up to the first character of the arguments.
_BEGINNING = re.compile(
    r'[\s\[\]{},]*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)'
)


class NamedCallReader:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name  # None: it has been told

    def push(self, text: str) -> Delta:
        if not text:
            return NOTHING
        name, self._name = self._name, None
        return Delta(calls=(ToolCall(name, text),))

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        return NOTHING


class RequiredCallsReader:
    """`[{"name": …, "arguments": …}, …]`. A call without arguments so far is not told."""

    def __init__(self) -> None:
        self._held = ""  # between arguments
        self._arguments: JsonScan | None = None  # None: between them

    def push(self, text: str) -> Delta:
        told = NOTHING
        while text:
            if self._arguments is not None:
                more, text = self._more(self._arguments, text)
                told += Delta(calls=(ToolCall(None, more),)) if more else NOTHING
                continue
            self._held += text
            begun = _BEGINNING.match(self._held)
            if begun is None:
                return told
            told += Delta(calls=(ToolCall(json.loads(begun[1]), ""),))
            text, self._held = self._held[begun.end() :], ""
            self._arguments = JsonScan()
        return told

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        return NOTHING

    def _more(self, arguments: JsonScan, text: str) -> tuple[str, str]:
        """Split the text where the arguments end."""
        end = arguments.scan(text)
        if end is None:
            return text, ""
        self._arguments = None
        return text[:end], text[end:]
