"""Incremental parsers of forced tool calls, whose JSON follows the tools' schemas. Pure.

Arguments are streamed as they arrive, and a call's name once it is complete.
"""

from __future__ import annotations

import json
import re

from baton.router.text_events.json_scan import JsonScan
from baton.router.text_events.output_parsers import NOTHING, Delta, ToolCall

# Up to the first character of the arguments.
_BEGINNING = re.compile(
    r'[\s\[\]{},]*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)'
)


class NamedCallParser:
    """Parses an answer that consists of one function's arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name  # None: it has been emitted

    def push(self, text: str) -> Delta:
        if not text:
            return NOTHING
        name, self._name = self._name, None
        return Delta(calls=(ToolCall(name, text),))

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        return NOTHING


class RequiredCallsParser:
    """Parses `[{"name": …, "arguments": …}, …]`. A call is emitted once its arguments begin."""

    def __init__(self) -> None:
        self._buffer = ""  # text between arguments
        self._arguments: JsonScan | None = None  # None: between arguments

    def push(self, text: str) -> Delta:
        delta = NOTHING
        while text:
            if self._arguments is not None:
                more, text = self._more(self._arguments, text)
                delta += Delta(calls=(ToolCall(None, more),)) if more else NOTHING
                continue
            self._buffer += text
            match = _BEGINNING.match(self._buffer)
            if match is None:
                return delta
            delta += Delta(calls=(ToolCall(json.loads(match[1]), ""),))
            text, self._buffer = self._buffer[match.end() :], ""
            self._arguments = JsonScan()
        return delta

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        return NOTHING

    def _more(self, arguments: JsonScan, text: str) -> tuple[str, str]:
        """Split the text where the arguments end."""
        end = arguments.scan(text)
        if end is None:
            return text, ""
        self._arguments = None
        return text[:end], text[end:]
