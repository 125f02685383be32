"""Incremental parsers of forced tool calls, whose JSON follows the tools' schemas. Pure.

Arguments are streamed as they arrive, and a call's name once it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from baton.router.text_events.events import ArgumentsDelta, TextEvent, ToolCall
from baton.router.text_events.scanning import JsonScan

# Up to the first character of the arguments.
_BEGINNING = re.compile(
    r'[\s\[\]{},]*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)'
)


class NamedCallParser:
    """Parses an answer that consists of one function's arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name  # None: it has been emitted

    def push(self, text: str) -> Sequence[TextEvent]:
        if not text:
            return []
        name, self._name = self._name, None
        return [ArgumentsDelta(text)] if name is None else [ToolCall(name, text)]

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return []


class RequiredCallsParser:
    """Parses `[{"name": …, "arguments": …}, …]`. A call is emitted once its arguments begin."""

    def __init__(self) -> None:
        self._buffer = ""  # text between arguments
        self._arguments: JsonScan | None = None  # None: between arguments

    def push(self, text: str) -> Sequence[TextEvent]:
        events: list[TextEvent] = []
        while text:
            if self._arguments is not None:
                more, text = self._more(self._arguments, text)
                if more:
                    events.append(ArgumentsDelta(more))
                continue
            self._buffer += text
            match = _BEGINNING.match(self._buffer)
            if match is None:
                return events
            events.append(ToolCall(json.loads(match[1])))
            text, self._buffer = self._buffer[match.end() :], ""
            self._arguments = JsonScan()
        return events

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return []

    def _more(self, arguments: JsonScan, text: str) -> tuple[str, str]:
        """Split the text where the arguments end."""
        end = arguments.scan(text)
        if end is None:
            return text, ""
        self._arguments = None
        return text[:end], text[end:]
