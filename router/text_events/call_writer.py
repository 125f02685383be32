"""Events of the content of an answer: text, and the calls that it contains. Pure."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
)


class ReadText(Protocol):
    """Result of reading an answer so far."""

    is_cut_off: bool  # by max_tokens or a stop string

    @property
    def text_since_mark(self) -> str: ...

    @property
    def is_at_end(self) -> bool: ...


class CallWriter:
    """Collects the events of one answer.

    A call begins once its name is known, and its arguments follow as they arrive. What is cut off,
    or what the model gets wrong, does not end, and is content.
    """

    def __init__(self, names: Set[str] = frozenset()) -> None:
        self.names = names  # of the request's tools
        self._events: list[TextEvent] = []
        self._space: list[str] = []  # text is whitespace next to a call, or more text follows
        self._has_text = False
        self.has_called = False

    def take_events(self) -> list[TextEvent]:
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        content = text.rstrip()
        if content:
            self._has_text = True
            self._events.append(TextDelta("".join((*self._space, content))))
            self._space.clear()
        self._space.append(text[len(content) :])

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def begin_call(self, name: str) -> None:
        if not self._has_text:
            self._space.clear()
        self._events.append(ToolCall(name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(text))

    def end_call(self) -> None:
        self.has_called = True
        self._events.append(CallEnd())

    def call(self, name: str, arguments: str) -> None:
        """Write a whole call."""
        self.begin_call(name)
        self.arguments(arguments)
        self.end_call()

    def fail_call(self, begin: str, source: ReadText) -> None:
        """End what began like a call, with this mark. Its text is content.

        It is dropped if the answer is cut off after other calls, or right after the mark.
        """
        rest = source.text_since_mark
        is_cut_off = source.is_cut_off and source.is_at_end
        if not (is_cut_off and (self.has_called or not rest.strip())):
            self.text(begin + rest)

    def finish(self) -> None:
        space = "".join(self._space)
        if space and not self.has_called:
            self._events.append(TextDelta(space))
        self._space.clear()
