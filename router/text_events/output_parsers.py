"""Incremental parsers of reasoning and tool calls in an answer's text. Pure.

The joined output does not depend on how the text is split into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol

from baton.core.options import MODEL, Option, check_options
from baton.router.text_events.json_scan import JsonScan

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
NO_JSON = (ValueError, RecursionError)


class ToolCall(NamedTuple):
    name: str | None  # None: more arguments of the call before it
    arguments: str  # JSON


class Delta(NamedTuple):
    """Parsed parts of a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Delta) -> Delta:  # type: ignore[override]
        return Delta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            _joined_calls(self.calls, other.calls),
        )


def _joined_calls(calls: tuple[ToolCall, ...], more: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    if not calls or not more or more[0].name is not None:
        return calls + more
    last = calls[-1]._replace(arguments=calls[-1].arguments + more[0].arguments)
    return (*calls[:-1], last, *more[1:])


NOTHING = Delta()


class OutputParser(Protocol):
    def push(self, text: str) -> Delta: ...

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        """Return the buffered rest. A call truncated by `max_tokens` after others is left out."""
        ...


class PlainTextParser:
    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        return NOTHING


class ThinkTagParser:
    """Parses a leading `<think>…</think>` as reasoning."""

    class _At(Enum):
        START = auto()
        REASONING = auto()
        CONTENT = auto()

    def __init__(self, content: OutputParser, *, begins_inside: bool) -> None:
        self._content = content  # reader of the text after the reasoning
        self._otherwise = self._At.REASONING if begins_inside else self._At.CONTENT
        self._at = self._At.START
        self._buffer = ""

    def push(self, text: str) -> Delta:
        self._buffer += text
        if self._at is self._At.START and not self._has_started():
            return NOTHING
        if self._at is self._At.REASONING:
            reasoning, has_ended = self._split_buffer(END_THINK)
            if not has_ended:
                return Delta(reasoning=reasoning)
            self._at = self._At.CONTENT
            return Delta(reasoning=reasoning) + self._content.push(self._take_buffer())
        return self._content.push(self._take_buffer())

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        at = self._otherwise if self._at is self._At.START else self._at
        if at is self._At.REASONING:
            return Delta(reasoning=self._take_buffer())
        return self._content.push(self._take_buffer()) + self._content.finish(is_cut_off=is_cut_off)

    def _has_started(self) -> bool:
        """Return whether enough text has arrived to see whether it begins with `<think>`."""
        start = self._buffer.lstrip()
        if len(start) < len(THINK) and THINK.startswith(start):
            return False
        self._at = self._otherwise
        if start.startswith(THINK):
            self._at, self._buffer = self._At.REASONING, start.removeprefix(THINK)
        return True

    def _split_buffer(self, mark: str) -> tuple[str, bool]:
        before_mark, self._buffer, is_found = split_at(self._buffer, mark)
        return before_mark, is_found

    def _take_buffer(self) -> str:
        buffered, self._buffer = self._buffer, ""
        return buffered


class _Content:
    """Text around calls. Whitespace next to a call is a separator and left out."""

    def __init__(self) -> None:
        self._space = ""
        self._has_called = False

    def text(self, text: str) -> Delta:
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return Delta(content)

    def calls(self, *calls: ToolCall) -> Delta:
        self._space, self._has_called = "", True
        return Delta(calls=calls)

    def finish(self) -> Delta:
        return NOTHING if self._has_called else Delta(self._space)

    @property
    def has_called(self) -> bool:
        return self._has_called


class HermesToolParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen and others.

    A call is emitted when it is complete; at the end, the closing mark can be missing. Calls that
    cannot be parsed are content. A closing mark inside a JSON string belongs to the string.
    """

    def __init__(self) -> None:
        self._buffer = ""  # possible beginning of a mark
        self._content = _Content()
        self._inside: list[str] | None = None  # the current call's text; None: outside a call
        self._scan = JsonScan()  # of the current call
        self._heeds_strings = True

    def push(self, text: str) -> Delta:
        self._buffer += text
        delta, is_found = NOTHING, True
        while is_found:
            before_mark, self._buffer, is_found = split_at(self._buffer, self._mark)
            delta += self._consume(before_mark, is_found=is_found)
        return delta

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        rest, self._buffer = self._buffer, ""
        if self._inside is None:
            is_begun_call = is_cut_off and self._content.has_called and rest.startswith("<tool")
            delta = NOTHING if is_begun_call else self._content.text(rest)
            return delta + self._content.finish()
        inside = "".join((*self._inside, rest))
        call = call_in(inside, ("arguments",))
        if call is not None:
            return self._content.calls(call)
        if END_CALL in inside:
            delta = self._reread(inside)
            return delta + self.push("") + self.finish(is_cut_off=is_cut_off)
        if is_cut_off and self._content.has_called:
            return NOTHING
        return self._content.text(CALL + inside) + self._content.finish()

    @property
    def _mark(self) -> str:
        return CALL if self._inside is None else END_CALL

    def _consume(self, text: str, *, is_found: bool) -> Delta:
        """Consume the text before the mark, and the mark if it has arrived."""
        if self._inside is None:
            if is_found:
                self._inside, self._scan = [], JsonScan()
            return self._content.text(text)
        self._inside.append(text)
        self._scan.scan(text)
        if not is_found:
            return NOTHING
        if self._heeds_strings and self._scan.is_in_string:
            self._inside.append(END_CALL)
            self._scan.scan(END_CALL)
            return NOTHING
        inside, self._inside = "".join(self._inside), None
        call = call_in(inside, ("arguments",))
        if call is not None:
            return self._content.calls(call)
        return self._reread(inside + END_CALL)

    def _reread(self, inside: str) -> Delta:
        """End an invalid call at its first closing mark, even inside a string.

        From then on, marks inside strings count, too: parsing the rest repeatedly would be slow.
        """
        first, _, behind = inside.partition(END_CALL)
        if behind:
            self._heeds_strings = False
        self._inside, self._buffer = None, behind + self._buffer
        return self._content.text(CALL + first + END_CALL)


class LlamaToolParser:
    """A call in JSON, or several with `;` between, to the end of the answer: Llama 3.

    Calls are the whole answer, or follow `<|python_tag|>`. They are emitted at the end, since they
    cannot be recognised as calls before.
    """

    def __init__(self) -> None:
        self._buffer = ""  # possible beginning of a call
        self._calls: list[str] = []  # text of the calls, in pieces
        self._content = _Content()
        self._is_call: bool | None = None  # None: not known yet

    def push(self, text: str) -> Delta:
        if self._is_call:
            self._calls.append(text)
            return NOTHING
        self._buffer += text
        if self._is_call is None:
            self._is_call = _begins_like_call(self._buffer)
        delta, is_found = NOTHING, True
        while self._is_call is False and is_found:
            # No call follows a tag at the beginning: it has been checked.
            skip = len(PYTHON_TAG) if self._buffer.startswith(PYTHON_TAG) else 0
            before_mark, rest, is_found = split_at(self._buffer[skip:], PYTHON_TAG)
            delta += self._content.text(self._buffer[:skip] + before_mark)
            self._buffer = PYTHON_TAG + rest if is_found else rest
            self._is_call = _begins_like_call(self._buffer) if is_found else False
        return delta

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        text = "".join((self._buffer, *self._calls))
        calls, rest = _calls_in_row(text.lstrip().removeprefix(PYTHON_TAG))
        delta = self._content.calls(*calls) if calls else self._content.text(text)
        if calls and not is_cut_off:
            delta += self._content.text(rest)
        return delta + self._content.finish()


def _begins_like_call(text: str) -> bool | None:
    """Return whether the text begins like a call, or None if it is too short."""
    start = text.lstrip()
    if len(start) < len(PYTHON_TAG) and PYTHON_TAG.startswith(start):
        return None
    behind = start.removeprefix(PYTHON_TAG).lstrip()
    return behind.startswith("{") if behind else None


class FirstCallFilter:
    """Drops calls after the first, for `parallel_tool_calls: false`, as vLLM does."""

    def __init__(self, reader: OutputParser) -> None:
        self._reader = reader
        self._has_called = False

    def push(self, text: str) -> Delta:
        return self._first(self._reader.push(text))

    def finish(self, *, is_cut_off: bool = False) -> Delta:
        return self._first(self._reader.finish(is_cut_off=is_cut_off))

    def _first(self, delta: Delta) -> Delta:
        calls = () if self._has_called else delta.calls[:1]
        self._has_called = self._has_called or bool(calls)
        return delta._replace(calls=calls)


def split_at(text: str, mark: str) -> tuple[str, str, bool]:
    """Split at the mark. Return the text before it, the rest, and whether the mark was found.

    If it was not found, the rest is the longest suffix that may begin the mark.
    """
    before, found, after = text.partition(mark)
    if found:
        return before, after, True
    longest = min(len(mark) - 1, len(text))
    held = next((size for size in range(longest, 0, -1) if mark.startswith(text[-size:])), 0)
    return text[: len(text) - held], text[len(text) - held :], False


def call_in(text: str, names_of_arguments: tuple[str, ...]) -> ToolCall | None:
    """Return the call in a JSON text, or None if it is not a call."""
    try:
        return _call_from(json.loads(text, parse_constant=_refuse), names_of_arguments)
    except NO_JSON:
        return None


def _calls_in_row(text: str) -> tuple[tuple[ToolCall, ...], str]:
    """Return the calls, and the rest if it begins like a call. No calls if it begins otherwise."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
            call = _call_from(value, ("parameters", "arguments"))
        except NO_JSON:
            call = None
        if call is None:
            return (tuple(calls), rest) if rest.startswith("{") else ((), "")
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return tuple(calls), ""


def _call_from(value: Any, names_of_arguments: tuple[str, ...]) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[name] for name in names_of_arguments if name in value), None)
    if not isinstance(arguments, dict):
        return None
    name: str = value["name"]
    call = ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    (name + call.arguments).encode()  # raises for a lone surrogate, which JSON can express
    return call


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


TOOL_READERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": LlamaToolParser,
}
TOOL_MARKS = {"hermes": (CALL, END_CALL), "llama3_json": (PYTHON_TAG,)}
# True if the chat template ends with `<think>`.
REASONING_BEGINS_INSIDE = {"qwen3": False, "deepseek_r1": True}


@dataclass(frozen=True, slots=True)
class Parsing:
    """Formats of the model's tool calls and reasoning; empty: all text is content."""

    tools: Annotated[
        str,
        Option(
            "Parser of tool calls for the OpenAI API: hermes (also for Qwen) or llama3_json. "
            "Default: tool calls stay text.",
            MODEL,
            name="tool_parser",
            choices=tuple(TOOL_READERS),
        ),
    ] = ""
    reasoning: Annotated[
        str,
        Option(
            "Parser of reasoning for the OpenAI API: qwen3, or deepseek_r1 if the chat template "
            "opens the reasoning. Default: reasoning stays text.",
            MODEL,
            name="reasoning_parser",
            choices=tuple(REASONING_BEGINS_INSIDE),
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_options(self)

    def marks(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the marks that must be visible in the text, also where they are special tokens."""
        of_tools = TOOL_MARKS.get(self.tools, ()) if with_tools else ()
        return (*of_tools, *((THINK, END_THINK) if self.reasoning else ()))

    def reader(self, *, with_tools: bool) -> OutputParser:
        """Return a new reader, one for each choice."""
        content: OutputParser = PlainTextParser()
        if with_tools and self.tools:
            content = TOOL_READERS[self.tools]()
        if not self.reasoning:
            return content
        return ThinkTagParser(content, begins_inside=REASONING_BEGINS_INSIDE[self.reasoning])


NO_PARSING = Parsing()
