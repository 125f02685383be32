"""Messages and stream events around the content of an answer. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

from pydantic_core import from_json

from baton.core.output import Finish, FinishReason
from baton.router.doors.messages.parsed_message import ParsedMessage
from baton.router.doors.openai.response.answers import tool_warnings
from baton.router.http.json_encoding import Json, named_event
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    EventReader,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
)
from baton.router.text_events.formats.json_calls import has_only_finite_numbers, strict_loads
from baton.router.values import AnswerPart

ID_BYTES = 12
THINKING, TEXT, TOOL_USE = "thinking", "text", "tool_use"


class MessageResponse:
    """Response to one request, whole or streamed."""

    def __init__(
        self, parsed: ParsedMessage, request_id: str, model: str, text: TextBoundary
    ) -> None:
        text_format = parsed.request.options.text_format
        self._parsed = parsed
        self._header = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._reader = EventReader(text_format.parser, 1)
        self._blocks = ContentBlocks(hides_thinking=parsed.hides_thinking)
        unsupported = tool_warnings(text_format, supports_tools=text.supports_tools)
        self._warnings = (*parsed.warnings, *unsupported)

    def start(self, num_prompt_tokens: int) -> bytes:
        """Return the first event. How much of the prompt is cached is known at the end."""
        usage = _usage(num_prompt_tokens, 0, 0)
        return named_event({"type": "message_start", "message": self._message([], None, usage)})

    def chunk(self, part: AnswerPart) -> bytes:
        """Return the events of the next part, those of the end included."""
        events = self.content_events(part)
        if isinstance(part, Finish):
            events += self._last_events(part)
        return b"".join(map(named_event, events))

    def content_events(self, part: AnswerPart) -> list[Json]:
        events = list(self._blocks.events(self._reader.read(0, part)))
        return [*events, *self._blocks.end()] if isinstance(part, Finish) else events

    def whole(self, events: Iterable[Json], end: Finish) -> Json:
        """Return the whole message, whose content is that of the events."""
        message = self._message(whole_content(events), end, usage_of(end))
        return {**message, **self._warnings_field(end)}

    def _last_events(self, end: Finish) -> list[Json]:
        delta = {"delta": self._stop_fields(end), "usage": usage_of(end)}
        return [
            {"type": "message_delta", **delta, **self._warnings_field(end)},
            {"type": "message_stop"},
        ]

    def _message(self, content: Sequence[Json], end: Finish | None, usage: Json) -> Json:
        stop = {"stop_reason": None, "stop_sequence": None}
        if end is not None:
            stop = self._stop_fields(end)
        return {**self._header, "content": content, **stop, "usage": usage}

    def _stop_fields(self, end: Finish) -> Json:
        return {"stop_reason": self._stop_reason(end), "stop_sequence": end.stop_string}

    def _stop_reason(self, end: Finish) -> str:
        if end.reason is FinishReason.LENGTH:
            is_lowered = end.num_completion_tokens < self._parsed.max_tokens and bool(end.warnings)
            return "model_context_window_exceeded" if is_lowered else "max_tokens"
        if self._blocks.has_only_whole_calls:
            return "tool_use"
        return "end_turn" if end.stop_string is None else "stop_sequence"

    def _warnings_field(self, end: Finish) -> Json:
        warnings = list(dict.fromkeys((*self._warnings, *end.warnings)))
        return {"warnings": warnings} if warnings else {}


def usage_of(end: Finish) -> Json:
    """Return the usage. As in Anthropic's API, `input_tokens` are those that were not cached."""
    num_cached = end.num_cached_prompt_tokens or 0
    return _usage(end.num_prompt_tokens - num_cached, num_cached, end.num_completion_tokens)


def _usage(num_computed: int, num_cached: int, num_completion_tokens: int) -> Json:
    return {
        "input_tokens": num_computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_completion_tokens,
    }


class ContentBlocks:
    """Turns the text events of one answer into events of content blocks."""

    def __init__(self, *, hides_thinking: bool = False) -> None:
        self._hides_thinking = hides_thinking
        self._index = -1
        self._open = ""  # kind of the current block; empty: none
        self._num_calls = 0
        self._num_ended_calls = 0

    @property
    def has_only_whole_calls(self) -> bool:
        """True if the answer has calls, and all of them have ended."""
        return 0 < self._num_calls == self._num_ended_calls

    def events(self, texts: Sequence[TextEvent]) -> Iterator[Json]:
        for event in texts:
            match event:
                case TextDelta():
                    yield from self._continue({"type": TEXT, "text": ""})
                    yield self._delta({"type": "text_delta", "text": event.text})
                case ReasoningDelta():
                    yield from self._continue({"type": THINKING, "thinking": "", "signature": ""})
                    if not self._hides_thinking:
                        yield self._delta({"type": "thinking_delta", "thinking": event.text})
                case ToolCall():
                    yield from self._begin(_tool_use(event))
                    self._num_calls += 1
                    if event.arguments:
                        yield self._arguments(event.arguments)
                case ArgumentsDelta():
                    yield self._arguments(event.arguments)
                case CallEnd():
                    self._num_ended_calls += 1
                    yield self._stop()

    def end(self) -> Iterator[Json]:
        """End the current block. A call that has not ended has no end: clients would run it."""
        if self._open not in ("", TOOL_USE):
            yield self._stop()
        self._open = ""

    def _stop(self) -> Json:
        self._open = ""
        return {"type": "content_block_stop", "index": self._index}

    def _continue(self, block: Json) -> Iterator[Json]:
        """Begin the block, unless the current one is of its kind."""
        if self._open != block["type"]:
            yield from self._begin(block)

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self.end()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _arguments(self, arguments: str) -> Json:
        return self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _tool_use(call: ToolCall) -> Json:
    identity = f"toolu_{secrets.token_hex(ID_BYTES)}"
    return {"type": TOOL_USE, "id": identity, "name": call.name, "input": {}}


def whole_content(events: Iterable[Json]) -> list[Json]:
    """Return the blocks that a client assembles from the events. They have ended."""
    blocks: list[Json] = []
    block, texts = Json(), list[str]()
    for event in events:
        if event["type"] == "content_block_start":
            block, texts = event["content_block"], []
        elif event["type"] == "content_block_delta":
            _, text = event["delta"].values()
            texts.append(text)
        else:
            blocks.append(_with_text(block, "".join(texts)))
    return blocks


def _with_text(block: Json, text: str) -> Json:
    if block["type"] == TOOL_USE:
        return {**block, "input": _input(text)}
    return {**block, block["type"]: text}


def _input(arguments: str) -> object:
    """Return the arguments of a call, none if they are nested too deeply to be sent."""
    try:
        found = from_json(arguments, allow_inf_nan=False)
        if has_only_finite_numbers(found):
            return found
        return strict_loads(arguments)
    except ValueError:
        return {}
