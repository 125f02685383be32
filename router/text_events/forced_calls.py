"""Incremental parsers of forced tool calls, whose JSON follows the tools' schemas. Pure.

Arguments are streamed as they arrive, and a call's name once it is complete.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence

from baton.router.text_events.events import ArgumentsDelta, CallEnd, TextEvent, ToolCall
from baton.router.text_events.scanning import JsonScan

# Up to the first character of the arguments.
_BEGINNING = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
BETWEEN_CALLS = string.whitespace + "[]{},"
MAX_HEAD_CHARACTERS = 1 << 9


class NamedCallParser:
    """Parses an answer that consists of one function's arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name  # None: it has been emitted
        self._arguments = JsonScan()
        self._has_ended = False

    def push(self, text: str) -> Sequence[TextEvent]:
        if not text or self._has_ended:
            return []
        end = self._arguments.scan(text)
        self._has_ended = end is not None
        name, self._name = self._name, None
        more = ArgumentsDelta(text[:end]) if name is None else ToolCall(name, text[:end])
        return [more, CallEnd()] if self._has_ended else [more]

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        if is_cut_off or self._has_ended or self._name is not None:
            return []
        is_whole_number = self._arguments.scan(",") is not None  # a number ends with the answer
        return [CallEnd()] if is_whole_number else []


class RequiredCallsParser:
    """Parses `[{"name": …, "arguments": …}, …]`. A call is emitted once its arguments begin."""

    def __init__(self) -> None:
        self._buffer = ""  # text between arguments
        self._arguments: JsonScan | None = None  # None: between arguments

    def push(self, text: str) -> Sequence[TextEvent]:
        events: list[TextEvent] = []
        while text:
            if self._arguments is not None:
                end = self._arguments.scan(text)
                events += [ArgumentsDelta(more)] if (more := text[:end]) else []
                if end is None:
                    return events
                events.append(CallEnd())
                text, self._arguments = text[end:], None
            self._buffer = (self._buffer + text).lstrip(BETWEEN_CALLS)
            match = _BEGINNING.match(self._buffer[:MAX_HEAD_CHARACTERS])
            if match is None:
                self._buffer = self._buffer[:MAX_HEAD_CHARACTERS]  # more does not begin a call
                return events
            events.append(ToolCall(json.loads(match[1])))
            text, self._buffer = self._buffer[match.end() :], ""
            self._arguments = JsonScan()
        return events

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return []
