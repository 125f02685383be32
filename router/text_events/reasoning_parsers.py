"""Parsers of the reasoning in a model's output. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from baton.router.text_events.events import OutputParser, ReasoningDelta, TextEvent
from baton.router.text_events.scanning import split_at

THINK, END_THINK = "<think>", "</think>"


class ThinkTagParser:
    """Parses a leading `<think>…</think>` as reasoning."""

    class _Section(Enum):
        START = auto()
        REASONING = auto()
        CONTENT = auto()

    def __init__(self, content: OutputParser, *, begins_inside: bool) -> None:
        self._content = content  # parser of the text after the reasoning
        self._default = self._Section.REASONING if begins_inside else self._Section.CONTENT
        self._section = self._Section.START
        self._buffer = ""

    def push(self, text: str) -> Sequence[TextEvent]:
        self._buffer += text
        if self._section is self._Section.START and not self._has_started():
            return []
        if self._section is self._Section.REASONING:
            reasoning, has_ended = self._split_buffer(END_THINK)
            if not has_ended:
                return _reasoning(reasoning)
            self._section = self._Section.CONTENT
            return [*_reasoning(reasoning), *self._content.push(self._take_buffer())]
        return self._content.push(self._take_buffer())

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        section = self._default if self._section is self._Section.START else self._section
        if section is self._Section.REASONING:
            return _reasoning(self._take_buffer())
        pushed = self._content.push(self._take_buffer())
        return [*pushed, *self._content.finish(is_cut_off=is_cut_off)]

    def _has_started(self) -> bool:
        """Return whether enough text has arrived to see whether it begins with `<think>`."""
        start = self._buffer.lstrip()
        if len(start) < len(THINK) and THINK.startswith(start):
            return False
        self._section = self._default
        if start.startswith(THINK):
            self._section, self._buffer = self._Section.REASONING, start.removeprefix(THINK)
        return True

    def _split_buffer(self, mark: str) -> tuple[str, bool]:
        before_mark, self._buffer, is_found = split_at(self._buffer, mark)
        return before_mark, is_found

    def _take_buffer(self) -> str:
        buffered, self._buffer = self._buffer, ""
        return buffered


def _reasoning(text: str) -> Sequence[TextEvent]:
    return [ReasoningDelta(text)] if text else []
