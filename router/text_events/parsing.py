"""Format of the answers to one request, and the parser for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.events import (
    ArgumentsDelta,
    OutputParser,
    TextDelta,
    TextEvent,
    ToolCall,
)
from baton.router.text_events.forced_calls import NamedCallParser, RequiredCallsParser
from baton.router.text_events.formats.argument_types import ArgumentTypes
from baton.router.text_events.reasoning_parsers import ReasoningMarks, ReasoningParser
from baton.router.text_events.script_parser import ScriptParser
from baton.router.text_events.table import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from baton.router.values import NO_PARSING, Parsing


class ToolCallMode(Enum):
    NONE = auto()
    BY_MODEL = auto()  # the model decides, in its own format
    REQUIRED = auto()  # the answer is a list of calls
    NAMED = auto()  # the answer is one function's arguments


FORCED = (ToolCallMode.REQUIRED, ToolCallMode.NAMED)


class PlainTextParser:
    def push(self, text: str) -> Sequence[TextEvent]:
        return [TextDelta(text)] if text else []

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return []


class EventFilter:
    """Drops events: calls after the first, for `parallel_tool_calls: false`, or all calls."""

    def __init__(self, parser: OutputParser, max_calls: int) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._num_calls = 0

    def push(self, text: str) -> Sequence[TextEvent]:
        return list(filter(self._is_kept, self._parser.push(text)))

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return list(filter(self._is_kept, self._parser.finish(is_cut_off=is_cut_off)))

    def _is_kept(self, event: TextEvent) -> bool:
        self._num_calls += isinstance(event, ToolCall)
        is_of_call = isinstance(event, ToolCall | ArgumentsDelta)
        return self._num_calls <= self._max_calls or not is_of_call


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Format of the answers to one request: what a model may write besides plain text."""

    parsing: Parsing = NO_PARSING
    tool_calls: ToolCallMode = ToolCallMode.NONE
    function: str = ""  # the one of mode NAMED
    has_one_call: bool = False  # further calls are dropped
    # By structured output: no reasoning, and no calls but forced ones.
    is_constrained: bool = False
    tools: Sequence[Mapping[str, Any]] = ()  # their schemas type arguments that are plain text
    streams_arguments: bool = False  # calls are emitted before they are complete

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must be visible in the text, also where they are special tokens."""
        if self.is_constrained:
            return ()
        tools, reasoning = self._tools, self._reasoning
        marks = () if tools is None else tools.marks
        return marks if reasoning is None else (*marks, *reasoning.texts)

    def parser(self, prompt_end: str = "") -> OutputParser:
        """Return a new parser for one answer to a prompt whose text ends so."""
        if self.tool_calls is ToolCallMode.NAMED:
            return NamedCallParser(self.function)
        if self.tool_calls is ToolCallMode.REQUIRED:
            return RequiredCallsParser()
        content: OutputParser = PlainTextParser()
        if self.is_constrained:
            return content
        if self._tools is not None:
            content = self._call_parser(self._tools)
        reasoning = self._reasoning
        if reasoning is None or (self._tools is not None and self._tools.has_reasoning):
            return content
        return ReasoningParser(content, reasoning, is_open=reasoning.is_open_after(prompt_end))

    @property
    def _tools(self) -> ToolFormat | None:
        """Format of tool calls; also without tools if it is the only one that has the reasoning."""
        found = TOOL_FORMATS.get(self.parsing.tools)
        if found is None or self.tool_calls is ToolCallMode.BY_MODEL:
            return found
        return found if found.has_reasoning else None

    @property
    def _reasoning(self) -> ReasoningMarks | None:
        return REASONING_FORMATS.get(self.parsing.reasoning)

    def _call_parser(self, tools: ToolFormat) -> OutputParser:
        types = ArgumentTypes(self.tools)
        writer = CallWriter(streams_arguments=self.streams_arguments, names=types.names)
        parser = ScriptParser(tools.script(types), writer)
        if self.tool_calls is not ToolCallMode.BY_MODEL:
            return EventFilter(parser, max_calls=0)
        return EventFilter(parser, max_calls=1) if self.has_one_call else parser


PLAIN_TEXT = TextFormat()
