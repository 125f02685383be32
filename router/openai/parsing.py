"""Reasoning and tool calls read out of an answer's text, which comes in pieces. Pure.

However a text is cut into pieces, what is read out of it, joined, is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn, Protocol

from engine.errors import InvalidConfig

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
NO_JSON = (ValueError, RecursionError)


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON


class Delta(NamedTuple):
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Delta) -> Delta:  # type: ignore[override]
        return Delta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.calls + other.calls,
        )


NOTHING = Delta()


class Reader(Protocol):
    def push(self, text: str) -> Delta: ...

    def finish(self) -> Delta:
        """What was held back, when the answer has ended."""
        ...


class PlainReader:
    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self) -> Delta:
        return NOTHING


class ThinkReader:
    """`<think>` at the beginning, up to `</think>`, is reasoning."""

    class _At(Enum):
        START = auto()
        REASONING = auto()
        CONTENT = auto()

    def __init__(self, content: Reader, *, begins_inside: bool) -> None:
        self._content = content  # of what follows the reasoning
        self._otherwise = self._At.REASONING if begins_inside else self._At.CONTENT
        self._at = self._At.START
        self._held = ""

    def push(self, text: str) -> Delta:
        self._held += text
        if self._at is self._At.START and not self._has_started():
            return NOTHING
        if self._at is self._At.REASONING:
            reasoning, has_ended = self._up_to(END_THINK)
            if not has_ended:
                return Delta(reasoning=reasoning)
            self._at = self._At.CONTENT
            return Delta(reasoning=reasoning) + self._content.push(self._take())
        return self._content.push(self._take())

    def finish(self) -> Delta:
        at = self._otherwise if self._at is self._At.START else self._at
        if at is self._At.REASONING:
            return Delta(reasoning=self._take())
        return self._content.push(self._take()) + self._content.finish()

    def _has_started(self) -> bool:
        """Whether it is known by now how the text begins."""
        begun = self._held.lstrip()
        if len(begun) < len(THINK) and THINK.startswith(begun):
            return False
        self._at = self._otherwise
        if begun.startswith(THINK):
            self._at, self._held = self._At.REASONING, begun.removeprefix(THINK)
        return True

    def _up_to(self, mark: str) -> tuple[str, bool]:
        passed, self._held, has_come = split_at(self._held, mark)
        return passed, has_come

    def _take(self) -> str:
        taken, self._held = self._held, ""
        return taken


class HermesReader:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen and others.

    A call is told when it is whole. One that cannot be read, or has no end, is content.
    """

    def __init__(self) -> None:
        self._held = ""  # what may begin a mark
        self._inside: list[str] | None = None  # a call so far; None: outside of one
        self._has_called = False
        self._gap = ""  # space behind a call, which is told only if text follows

    def push(self, text: str) -> Delta:
        self._held += text
        told, has_come = NOTHING, True
        while has_come:
            passed, self._held, has_come = split_at(self._held, self._mark)
            told += self._passed(passed, has_come=has_come)
        return told

    def finish(self) -> Delta:
        rest, self._held = self._held, ""
        return self._said(rest if self._inside is None else "".join((CALL, *self._inside, rest)))

    @property
    def _mark(self) -> str:
        return CALL if self._inside is None else END_CALL

    def _passed(self, text: str, *, has_come: bool) -> Delta:
        """What is in front of the mark, which may have come."""
        if self._inside is None:
            self._inside = [] if has_come else None
            return self._said(text)
        self._inside.append(text)
        if not has_come:
            return NOTHING
        inside, self._inside = "".join(self._inside), None
        return self._called(inside)

    def _called(self, inside: str) -> Delta:
        call = call_in(inside, ("arguments",))
        if call is None:
            return self._said(CALL + inside + END_CALL)
        self._has_called, self._gap = True, ""
        return Delta(calls=(call,))

    def _said(self, text: str) -> Delta:
        if not self._has_called:
            return Delta(text)
        self._gap += text
        said = self._gap.rstrip()
        self._gap = self._gap[len(said) :]
        return Delta(said)


class LlamaReader:
    """The whole answer is one call in JSON, or several with `;` between: Llama 3.

    An answer that begins like one is told at its end, since only then it is known to be one.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_call: bool | None = None  # None: it is not known yet

    def push(self, text: str) -> Delta:
        if self._is_call is False:
            return Delta(text)
        self._held.append(text)
        if self._is_call is None:
            self._is_call = _begins_like_call("".join(self._held))
        return Delta(self._take()) if self._is_call is False else NOTHING

    def finish(self) -> Delta:
        text = self._take()
        calls = _calls_in_row(text.lstrip().removeprefix(PYTHON_TAG))
        return Delta(calls=calls) if calls else Delta(text)

    def _take(self) -> str:
        taken = "".join(self._held)
        self._held.clear()
        return taken


def _begins_like_call(text: str) -> bool | None:
    """None: it is too short to tell."""
    begun = text.lstrip()
    if len(begun) < len(PYTHON_TAG) and PYTHON_TAG.startswith(begun):
        return None
    behind = begun.removeprefix(PYTHON_TAG).lstrip()
    return behind.startswith("{") if behind else None


def split_at(text: str, mark: str) -> tuple[str, str, bool]:
    """What is surely in front of the mark, what is left behind it, and whether it has come."""
    before, found, after = text.partition(mark)
    if found:
        return before, after, True
    longest = min(len(mark) - 1, len(text))
    held = next((size for size in range(longest, 0, -1) if mark.startswith(text[-size:])), 0)
    return text[: len(text) - held], text[len(text) - held :], False


def call_in(text: str, names_of_arguments: tuple[str, ...]) -> ToolCall | None:
    """None: it is no call."""
    try:
        return _call_from(json.loads(text, parse_constant=_refuse), names_of_arguments)
    except NO_JSON:
        return None


def _calls_in_row(text: str) -> tuple[ToolCall, ...]:
    """Empty unless all of it is calls."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
            call = _call_from(value, ("parameters", "arguments"))
        except NO_JSON:
            return ()
        if call is None:
            return ()
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return tuple(calls)


def _call_from(value: Any, names_of_arguments: tuple[str, ...]) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[name] for name in names_of_arguments if name in value), None)
    if not isinstance(arguments, dict):
        return None
    call = ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
    "".join(call).encode()  # half a surrogate pair, which JSON can spell, is no text
    return call


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


TOOL_READERS: dict[str, Callable[[], Reader]] = {"hermes": HermesReader, "llama3_json": LlamaReader}
# Whether the template has written `<think>` already.
REASONING_BEGINS_INSIDE = {"qwen3": False, "deepseek_r1": True}


def _check(option: str, name: str, known: dict[str, Any]) -> None:
    if name and name not in known:
        raise InvalidConfig(f"{option} {name!r}: choose one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Parsing:
    """Which forms this model writes; empty: all of it is content."""

    tools: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        _check("--tool-parser", self.tools, TOOL_READERS)
        _check("--reasoning-parser", self.reasoning, REASONING_BEGINS_INSIDE)

    def reader(self, *, with_tools: bool) -> Reader:
        """A new one for each choice."""
        content: Reader = PlainReader()
        if with_tools and self.tools:
            content = TOOL_READERS[self.tools]()
        if not self.reasoning:
            return content
        return ThinkReader(content, begins_inside=REASONING_BEGINS_INSIDE[self.reasoning])


ALL_IS_CONTENT = Parsing()
