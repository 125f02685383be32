"""Parsers of the tool calls that a model writes in its own format. Pure."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from baton.router.text_events.events import TextDelta, TextEvent, ToolCall
from baton.router.text_events.scanning import JsonScan, split_at

CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
NO_JSON = (ValueError, RecursionError)


class _SurroundingText:
    """Text around calls. Whitespace next to a call is a separator and left out."""

    def __init__(self) -> None:
        self._space = ""
        self._has_called = False

    def text(self, text: str) -> list[TextEvent]:
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return [TextDelta(content)] if content else []

    def calls(self, *calls: ToolCall) -> list[TextEvent]:
        self._space, self._has_called = "", True
        return list(calls)

    def finish(self) -> list[TextEvent]:
        return [] if self._has_called or not self._space else [TextDelta(self._space)]

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
        self._content = _SurroundingText()
        self._inside: list[str] | None = None  # the current call's text; None: outside a call
        self._scan = JsonScan()  # of the current call
        self._ignores_marks_in_strings = True

    def push(self, text: str) -> list[TextEvent]:
        self._buffer += text
        events: list[TextEvent] = []
        is_found = True
        while is_found:
            before_mark, self._buffer, is_found = split_at(self._buffer, self._mark)
            events += self._consume(before_mark, is_found=is_found)
        return events

    def finish(self, *, is_cut_off: bool = False) -> list[TextEvent]:
        rest, self._buffer = self._buffer, ""
        if self._inside is None:
            is_begun_call = is_cut_off and self._content.has_called and rest.startswith("<tool")
            events = [] if is_begun_call else self._content.text(rest)
            return events + self._content.finish()
        inside = "".join((*self._inside, rest))
        call = call_in(inside, ("arguments",))
        if call is not None:
            return self._content.calls(call)
        if END_CALL in inside:
            events = self._reread(inside)
            return events + self.push("") + self.finish(is_cut_off=is_cut_off)
        if is_cut_off and self._content.has_called:
            return []
        return self._content.text(CALL + inside) + self._content.finish()

    @property
    def _mark(self) -> str:
        return CALL if self._inside is None else END_CALL

    def _consume(self, text: str, *, is_found: bool) -> list[TextEvent]:
        """Consume the text before the mark, and the mark if it has arrived."""
        if self._inside is None:
            if is_found:
                self._inside, self._scan = [], JsonScan()
            return self._content.text(text)
        self._inside.append(text)
        self._scan.scan(text)
        if not is_found:
            return []
        if self._ignores_marks_in_strings and self._scan.is_in_string:
            self._inside.append(END_CALL)
            self._scan.scan(END_CALL)
            return []
        inside, self._inside = "".join(self._inside), None
        call = call_in(inside, ("arguments",))
        if call is not None:
            return self._content.calls(call)
        return self._reread(inside + END_CALL)

    def _reread(self, inside: str) -> list[TextEvent]:
        """End an invalid call at its first closing mark, even inside a string.

        From then on, marks inside strings count, too: parsing the rest repeatedly would be slow.
        """
        first, _, behind = inside.partition(END_CALL)
        if behind:
            self._ignores_marks_in_strings = False
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
        self._content = _SurroundingText()
        self._is_call: bool | None = None  # None: not known yet

    def push(self, text: str) -> list[TextEvent]:
        if self._is_call:
            self._calls.append(text)
            return []
        self._buffer += text
        # A tag that began in an earlier part has not been checked for a call behind it.
        is_checked = self._is_call is None
        if self._is_call is None:
            self._is_call = _begins_like_call(self._buffer)
        events: list[TextEvent] = []
        is_found = True
        while self._is_call is False and is_found:
            skip = len(PYTHON_TAG) if is_checked and self._buffer.startswith(PYTHON_TAG) else 0
            before_mark, rest, is_found = split_at(self._buffer[skip:], PYTHON_TAG)
            events += self._content.text(self._buffer[:skip] + before_mark)
            self._buffer = PYTHON_TAG + rest if is_found else rest
            self._is_call = _begins_like_call(self._buffer) if is_found else False
            is_checked = True
        return events

    def finish(self, *, is_cut_off: bool = False) -> list[TextEvent]:
        text = "".join((self._buffer, *self._calls))
        calls, rest = _calls_in_row(text.lstrip().removeprefix(PYTHON_TAG))
        events = self._content.calls(*calls) if calls else self._content.text(text)
        if calls and not is_cut_off:
            events += self._content.text(rest)
        return events + self._content.finish()


def _begins_like_call(text: str) -> bool | None:
    """Return whether the text begins like a call, or None if it is too short."""
    start = text.lstrip()
    if len(start) < len(PYTHON_TAG) and PYTHON_TAG.startswith(start):
        return None
    behind = start.removeprefix(PYTHON_TAG).lstrip()
    return behind.startswith("{") if behind else None


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
