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
    """A call begins, with the arguments that are known so far. It counts once it has ended."""

    name: str
    arguments: str = ""  # JSON


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More arguments of the last call."""

    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The last call is complete. One that is cut off or that the model writes wrong has no end."""


TextEvent = TextDelta | ReasoningDelta | ToolCall | ArgumentsDelta | CallEnd


class OutputParser(Protocol):
    """Incremental parser of the text of one answer. Its events are not empty."""

    def push(self, text: str) -> Sequence[TextEvent]: ...

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        """Return the buffered rest. `is_cut_off`: not the model ended the answer.

        A call that is cut off after others is left out.
        """
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
        is_cut_off = part.reason is FinishReason.LENGTH or part.stop_string is not None
        return parser.finish(is_cut_off=is_cut_off)


class AnswerText(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()  # that have ended
    num_unended_calls: int = 0


def fold(events: Sequence[TextEvent]) -> AnswerText:
    if len(events) == 1 and isinstance(events[0], TextDelta):  # as in nearly every chunk
        return AnswerText(events[0].text)
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    num_begun, name, arguments = 0, "", list[str]()
    for event in events:
        match event:
            case TextDelta():
                content.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCall():
                num_begun, name, arguments = num_begun + 1, event.name, [event.arguments]
            case ArgumentsDelta():
                arguments.append(event.arguments)
            case CallEnd():
                calls.append(ToolCall(name, "".join(arguments)))
    num_unended = num_begun - len(calls)
    return AnswerText("".join(content), "".join(reasoning), tuple(calls), num_unended)
