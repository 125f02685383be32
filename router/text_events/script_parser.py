"""Parsers written as scripts: generators that read an answer's text and wait where it ends. Pure.

A script decides only what more text cannot change, so its events do not depend on how the text is
split into parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.events import TextEvent
from baton.router.text_events.scanning import MAX_SPACE_CHARACTERS, find_first, held_length

Result = TypeVar("Result")
Waiting = Generator[None, None, Result]  # yields while it waits for more text
PIECE_CHARACTERS = 1 << 10


class TextBuffer:
    """Text of one answer that has arrived and is not read yet.

    Scripts see it in pieces: reading a part of the buffer copies the rest.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.is_cut_off = False  # by max_tokens or a stop string
        self._arriving: deque[str] = deque()
        self._has_ended = False
        self._read: list[str] = []

    @property
    def is_closed(self) -> bool:
        """True if the buffer is the end of the answer."""
        return self._has_ended and not self._arriving

    def add(self, text: str) -> None:
        self._arriving.extend(_pieces(text))

    def end(self, *, is_cut_off: bool, drops_rest: bool) -> None:
        self._has_ended, self.is_cut_off = True, is_cut_off
        if drops_rest:
            self.buffer = ""

    def mark(self) -> None:
        """Begin to record what is read, for `text_since_mark`."""
        self._read = []

    @property
    def text_since_mark(self) -> str:
        return "".join(self._read)

    @property
    def is_at_end(self) -> bool:
        return self.is_closed and not self.buffer

    def take(self, count: int) -> str:
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        self._read.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Return the last text that was read, to be read again."""
        if self._read[-1] == text:
            self._read.pop()
        else:
            self._read = [self.text_since_mark.removesuffix(text)]
        self._arriving.extendleft(reversed(_pieces(text + self.buffer)))
        self.buffer = ""

    def more(self) -> Waiting[bool]:
        """Wait for more text. Returns False at the end of the answer."""
        if self.is_closed:
            return False
        if not self._arriving:
            yield
        if self._arriving:
            self.buffer += self._arriving.popleft()
        return True

    def read_to(self, marks: Sequence[str], on_text: Callable[[str], None]) -> Waiting[str]:
        """Read up to the first of the marks, and the mark. Returns it, or "" at the end."""
        while True:
            index, found = find_first(self.buffer, marks)
            if found:
                on_text(self.take(index))
                return self.take(len(found))
            held = 0 if self.is_closed else held_length(self.buffer, marks)
            if len(self.buffer) > held:
                on_text(self.take(len(self.buffer) - held))
            if not (yield from self.more()):
                return ""

    def read_until(self, *marks: str) -> Waiting[str | None]:
        """Read up to the first of the marks, and the mark. Returns the text, None at the end."""
        parts: list[str] = []
        found = yield from self.read_to(marks, parts.append)
        return "".join(parts) if found else None

    def choose(self, *texts: str, skips_space: bool = True) -> Waiting[str]:
        """Return which of the texts comes next, without reading it; "" if none does."""
        while True:
            start = self.buffer.lstrip() if skips_space else self.buffer
            if len(self.buffer) - len(start) > MAX_SPACE_CHARACTERS:
                return ""
            found = next((text for text in texts if start.startswith(text)), "")
            if found or not any(text.startswith(start) for text in texts):
                return found
            if not (yield from self.more()):
                return ""

    def accept(self, *texts: str) -> Waiting[str]:
        """Read whitespace and the one of the texts that comes next; reads nothing if none does."""
        found = yield from self.choose(*texts)
        if found:
            self.skip_space()
            self.take(len(found))
        return found

    def skip_space(self) -> None:
        self.take(len(self.buffer) - len(self.buffer.lstrip()))


def _pieces(text: str) -> list[str]:
    return [text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS)]


class ScriptParser:
    """Implements `OutputParser` by a script."""

    def __init__(
        self, script: Callable[[TextBuffer, CallWriter], Waiting[None]], writer: CallWriter
    ) -> None:
        self._source = TextBuffer()
        self._writer = writer
        self._steps = script(self._source, writer)

    def push(self, text: str) -> list[TextEvent]:
        if text:
            self._source.add(text)
            next(self._steps, None)
        return self._writer.take_events()

    def finish(self, *, is_cut_off: bool = False) -> list[TextEvent]:
        # The rest is the beginning of a mark, or part of a call.
        has_part = is_cut_off and self._writer.has_called
        self._source.end(is_cut_off=is_cut_off, drops_rest=has_part)
        next(self._steps, None)
        self._writer.finish()
        return self._writer.take_events()
