"""Events of an answer's text, between the parsers of a model's output and the APIs. Pure.

An API turns the events of each part of an answer into its own chunks, and the fold of all events
into a whole answer. The fold does not depend on how the text is split into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.core.output import FinishReason
from baton.router.values import AnswerPart, TokenChunk


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, with the arguments that are known so far."""

    name: str
    arguments: str = ""  # JSON


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More arguments of the last call."""

    arguments: str


TextEvent = TextDelta | ReasoningDelta | ToolCall | ArgumentsDelta


class OutputParser(Protocol):
    """Incremental parser of the text of one answer. Its events are not empty."""

    def push(self, text: str) -> Sequence[TextEvent]: ...

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        """Return the buffered rest. A call truncated by `max_tokens` after others is left out."""
        ...


class EventReader:
    """Turns the parts of all answers to a request into events."""

    def __init__(self, new_parser: Callable[[str], OutputParser], num_answers: int) -> None:
        """`new_parser` takes the end of the prompt's text, which the first part of an answer has.

        Chat templates begin some answers, such as their reasoning.
        """
        self._new_parser = new_parser
        self._parsers: list[OutputParser | None] = [None] * num_answers

    def read(self, index: int, part: AnswerPart) -> Sequence[TextEvent]:
        """Return the events of the next part of this answer."""
        parser = self._parsers[index]
        if parser is None:
            prompt_end = part.prompt_end if isinstance(part, TokenChunk) else ""
            parser = self._parsers[index] = self._new_parser(prompt_end)
        if isinstance(part, TokenChunk):
            return parser.push(part.text)
        return parser.finish(is_cut_off=part.reason is FinishReason.LENGTH)


class AnswerText(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def fold(events: Sequence[TextEvent]) -> AnswerText:
    if len(events) == 1 and isinstance(events[0], TextDelta):  # as in nearly every chunk
        return AnswerText(events[0].text)
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []  # names and arguments
    for event in events:
        match event:
            case TextDelta():
                content.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCall():
                calls.append((event.name, [event.arguments]))
            case ArgumentsDelta():
                calls[-1][1].append(event.arguments)
    joined = (ToolCall(name, "".join(arguments)) for name, arguments in calls)
    return AnswerText("".join(content), "".join(reasoning), tuple(joined))
