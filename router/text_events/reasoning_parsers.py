"""Parsers of the reasoning in a model's output. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from baton.router.text_events.events import OutputParser, ReasoningDelta, TextEvent
from baton.router.text_events.scanning import MAX_SPACE_CHARACTERS, find_first, held_length
from baton.router.values import ReasoningMarks


class ReasoningParser:
    """Parses a leading section between marks as reasoning."""

    class _Section(Enum):
        START = auto()
        REASONING = auto()
        CONTENT = auto()

    def __init__(self, content: OutputParser, marks: ReasoningMarks, *, is_open: bool) -> None:
        self._content = content  # parser of the text after the reasoning
        self._marks = marks
        self._default = self._Section.REASONING if is_open else self._Section.CONTENT
        self._section = self._Section.START
        self._buffer = ""

    def push(self, text: str) -> Sequence[TextEvent]:
        self._buffer += text
        if self._section is self._Section.START and not self._has_started():
            return []
        if self._section is self._Section.REASONING:
            reasoning, has_ended = self._split_buffer()
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
        """Return whether enough text has arrived to see whether it begins with the mark."""
        begin, start = self._marks.begin, self._buffer.lstrip()
        can_begin = len(self._buffer) - len(start) <= MAX_SPACE_CHARACTERS
        if can_begin and len(start) < len(begin) and begin.startswith(start):
            return False
        self._section = self._default
        if can_begin and start.startswith(begin):
            self._section, self._buffer = self._Section.REASONING, start.removeprefix(begin)
        return True

    def _split_buffer(self) -> tuple[str, bool]:
        """Return the reasoning before its end, and whether it has ended."""
        marks = (self._marks.end, *self._marks.next_tags)
        index, mark = find_first(self._buffer, marks)
        if not mark:
            index = len(self._buffer) - held_length(self._buffer, marks)
        reasoning, self._buffer = self._buffer[:index], self._buffer[index:]
        if mark == self._marks.end:
            self._buffer = self._buffer.removeprefix(mark)
        return reasoning, bool(mark)

    def _take_buffer(self) -> str:
        buffered, self._buffer = self._buffer, ""
        return buffered


def _reasoning(text: str) -> Sequence[TextEvent]:
    return [ReasoningDelta(text)] if text else []
