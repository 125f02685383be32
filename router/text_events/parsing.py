"""Format of the answers to one request, and the parser for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    OutputParser,
    TextDelta,
    TextEvent,
    ToolCall,
)
from baton.router.text_events.forced_calls import NamedCallParser, RequiredCallsParser
from baton.router.text_events.formats.argument_types import ArgumentTypes
from baton.router.text_events.reasoning_parsers import ReasoningParser
from baton.router.text_events.script_parser import ScriptParser
from baton.router.text_events.table import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from baton.router.values import NO_PARSING, Parsing, ReasoningMarks, ReasoningTokens


class ToolCallMode(Enum):
    NONE = auto()
    BY_MODEL = auto()  # the model decides, in its own format
    REQUIRED = auto()  # the answer is a list of calls
    NAMED = auto()  # the answer is one function's arguments


class Constraint(Enum):
    """Part of an answer that structured output constrains."""

    NONE = auto()
    CALLS = auto()  # the arguments of calls that the model decides about
    ANSWER = auto()  # all that follows the reasoning: there are no calls but forced ones


class PlainTextParser:
    def push(self, text: str) -> Sequence[TextEvent]:
        return [TextDelta(text)] if text else []

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return []


class EventFilter:
    """Drops calls after the first that ends, for `parallel_tool_calls: false`, or all calls."""

    def __init__(self, parser: OutputParser, max_calls: int) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._num_ended = 0

    def push(self, text: str) -> Sequence[TextEvent]:
        return list(filter(self._is_kept, self._parser.push(text)))

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return list(filter(self._is_kept, self._parser.finish(is_cut_off=is_cut_off)))

    def _is_kept(self, event: TextEvent) -> bool:
        is_of_call = isinstance(event, ToolCall | ArgumentsDelta | CallEnd)
        is_kept = self._num_ended < self._max_calls or not is_of_call
        self._num_ended += isinstance(event, CallEnd)
        return is_kept


class ContentPipe:
    """Passes the content that a parser finds on to another one."""

    def __init__(self, parser: OutputParser, content: OutputParser) -> None:
        self._parser, self._content = parser, content

    def push(self, text: str) -> Sequence[TextEvent]:
        return self._pass_on(self._parser.push(text))

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        rest = self._pass_on(self._parser.finish(is_cut_off=is_cut_off))
        return [*rest, *self._content.finish(is_cut_off=is_cut_off)]

    def _pass_on(self, events: Sequence[TextEvent]) -> list[TextEvent]:
        passed: list[TextEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                passed += self._content.push(event.text)
            else:
                passed.append(event)
        return passed


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Format of the answers to one request: what a model may write besides plain text."""

    parsing: Parsing = NO_PARSING
    tool_calls: ToolCallMode = ToolCallMode.NONE
    function: str = ""  # the one of mode NAMED
    has_one_call: bool = False  # further calls are dropped
    constraint: Constraint = Constraint.NONE
    tools: Sequence[Mapping[str, Any]] = ()  # their schemas type arguments that are plain text

    @property
    def is_constrained(self) -> bool:
        return self.constraint is Constraint.ANSWER

    @property
    def reasoning_tokens(self) -> ReasoningTokens | None:
        """Tokens of the reasoning in front of a structured output, None if it has none.

        Calls can also be among the messages of the reasoning, which their constraint describes.
        """
        is_joint = self.constraint is Constraint.CALLS and self._has_joint_script
        return None if is_joint else self.parsing.reasoning_tokens

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must be visible in the text, also where they are special tokens."""
        if self.is_constrained and self.reasoning_tokens is None:
            return ()
        tools, reasoning = self._tools, self._reasoning
        marks = () if tools is None else tools.marks
        return marks if reasoning is None else (*marks, *reasoning.texts)

    def parser(self, prompt_end: str = "") -> OutputParser:
        """Return a new parser for one answer to a prompt whose text ends so."""
        content, reasoning = self._content_parser(), self._reasoning
        if self._has_joint_script:
            is_plain = isinstance(content, PlainTextParser | EventFilter | ScriptParser)
            return self._call_parser() if is_plain else ContentPipe(self._call_parser(), content)
        if reasoning is None or (self.is_constrained and self.reasoning_tokens is None):
            return content
        if self.is_constrained:
            reasoning = replace(reasoning, next_tags=())
        return ReasoningParser(content, reasoning, is_open=reasoning.is_open_after(prompt_end))

    def _content_parser(self) -> OutputParser:
        """Return the parser of what follows the reasoning."""
        if self.tool_calls is ToolCallMode.NAMED:
            return NamedCallParser(self.function)
        if self.tool_calls is ToolCallMode.REQUIRED:
            return RequiredCallsParser()
        if self.is_constrained or self._tools is None:
            return PlainTextParser()
        return self._call_parser()

    @property
    def _has_joint_script(self) -> bool:
        """True if one script parses reasoning and calls."""
        can_reason = not self.is_constrained or self.parsing.reasoning_tokens is not None
        return can_reason and bool(_joint_tools(self.parsing))

    @property
    def _tools(self) -> ToolFormat | None:
        """Format of tool calls, also without tools if its script parses the reasoning."""
        if self._has_joint_script:
            return TOOL_FORMATS[_joint_tools(self.parsing)]
        is_free = self.tool_calls is ToolCallMode.BY_MODEL and not self.is_constrained
        return TOOL_FORMATS.get(self.parsing.tools) if is_free else None

    @property
    def _reasoning(self) -> ReasoningMarks | None:
        return REASONING_FORMATS.get(self.parsing.reasoning)

    def _call_parser(self) -> OutputParser:
        if self._tools is None:
            return PlainTextParser()
        types = ArgumentTypes(self.tools)
        writer = CallWriter(types.names)
        parser = ScriptParser(self._tools.script(types), writer)
        if self.tool_calls is not ToolCallMode.BY_MODEL or self.is_constrained:
            return EventFilter(parser, max_calls=0)
        return EventFilter(parser, max_calls=1) if self.has_one_call else parser


PLAIN_TEXT = TextFormat()


def format_of_calls(parsing: Parsing) -> str:
    """Return the name of the format in which calls are read, empty without one."""
    return _joint_tools(parsing) or parsing.tools


def _joint_tools(parsing: Parsing) -> str:
    """Return the format whose script parses reasoning and calls, empty if two do."""
    reasoning = REASONING_FORMATS.get(parsing.reasoning)
    return "" if reasoning is None else reasoning.tool_format
