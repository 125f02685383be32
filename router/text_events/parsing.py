"""Formats of answers, and the parsers for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.router.text_events.events import (
    ArgumentsDelta,
    OutputParser,
    TextDelta,
    TextEvent,
    ToolCall,
)
from baton.router.text_events.forced_calls import NamedCallParser, RequiredCallsParser
from baton.router.text_events.reasoning_parsers import (
    END_THINK,
    THINK,
    ThinkTagParser,
)
from baton.router.text_events.tool_parsers import (
    CALL,
    END_CALL,
    PYTHON_TAG,
    HermesToolParser,
    LlamaToolParser,
)
from baton.router.values import NO_PARSING, Parsing

TOOL_PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": LlamaToolParser,
}
TOOL_MARKS = {"hermes": (CALL, END_CALL), "llama3_json": (PYTHON_TAG,)}
# True if the chat template ends with `<think>`.
REASONING_BEGINS_INSIDE = {"qwen3": False, "deepseek_r1": True}


class ToolCallMode(Enum):
    NONE = auto()
    BY_MODEL = auto()  # the model decides, in its own format
    REQUIRED = auto()  # the answer is a list of calls
    NAMED = auto()  # the answer is one function's arguments


class PlainTextParser:
    def push(self, text: str) -> Sequence[TextEvent]:
        return [TextDelta(text)] if text else []

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return []


class FirstCallFilter:
    """Drops calls after the first, for `parallel_tool_calls: false`, as vLLM does."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def push(self, text: str) -> Sequence[TextEvent]:
        return list(filter(self._is_kept, self._parser.push(text)))

    def finish(self, *, is_cut_off: bool = False) -> Sequence[TextEvent]:
        return list(filter(self._is_kept, self._parser.finish(is_cut_off=is_cut_off)))

    def _is_kept(self, event: TextEvent) -> bool:
        self._num_calls += isinstance(event, ToolCall)
        return self._num_calls <= 1 or not isinstance(event, ToolCall | ArgumentsDelta)


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Format of the answers to one request: what a model may write besides plain text."""

    parsing: Parsing = NO_PARSING
    tool_calls: ToolCallMode = ToolCallMode.NONE
    function: str = ""  # the one of mode NAMED
    has_one_call: bool = False  # further calls are dropped
    # By structured output: no reasoning, and no calls but forced ones.
    is_constrained: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must be visible in the text, also where they are special tokens."""
        if self.is_constrained:
            return ()
        calls_by_model = self.tool_calls is ToolCallMode.BY_MODEL
        marks = TOOL_MARKS.get(self.parsing.tools, ()) if calls_by_model else ()
        return (*marks, *((THINK, END_THINK) if self.parsing.reasoning else ()))

    def parser(self) -> OutputParser:
        """Return a new parser, one for each answer."""
        if self.tool_calls is ToolCallMode.NAMED:
            return NamedCallParser(self.function)
        if self.tool_calls is ToolCallMode.REQUIRED:
            return RequiredCallsParser()
        content: OutputParser = PlainTextParser()
        if self.is_constrained:
            return content
        if self.tool_calls is ToolCallMode.BY_MODEL and self.parsing.tools:
            content = TOOL_PARSERS[self.parsing.tools]()
        if self.has_one_call:
            content = FirstCallFilter(content)
        if not self.parsing.reasoning:
            return content
        begins_inside = REASONING_BEGINS_INSIDE[self.parsing.reasoning]
        return ThinkTagParser(content, begins_inside=begins_inside)


PLAIN_TEXT = TextFormat()
