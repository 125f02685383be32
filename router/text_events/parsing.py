"""Format of the answers to one request, and the parser for it. Pure."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
)
from baton.router.text_events.formats.argument_types import ArgumentTypes
from baton.router.text_events.scanning import (
    MAX_SPACE_CHARACTERS,
    JsonScan,
    find_first,
    held_length,
)
from baton.router.text_events.script_parser import ScriptParser
from baton.router.text_events.table import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from baton.router.values import NO_PARSING, Parsing, ReasoningMarks, ReasoningTokens

# Up to the first character of the arguments.
_BEGINNING = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
BETWEEN_CALLS = string.whitespace + "[]{},"
MAX_HEAD_CHARACTERS = 1 << 9


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
            script = self._call_parser()
            if reasoning is not None and reasoning.is_open_after(prompt_end):
                script.push(reasoning.begin)
            is_plain = isinstance(content, PlainTextParser | EventFilter | ScriptParser)
            return script if is_plain else ContentPipe(script, content)
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


class NamedCallParser:
    """Parses an answer that consists of one function's arguments.

    Arguments are streamed as they arrive, and a call's name once it is complete.
    """

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
