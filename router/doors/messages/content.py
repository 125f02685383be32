"""Content blocks of an answer, as events of a stream or as a whole. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

from pydantic_core import from_json

from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
)
from baton.router.text_events.formats.strict_json import has_only_finite_numbers, strict_loads

ID_BYTES = 12
THINKING, TEXT, TOOL_USE = "thinking", "text", "tool_use"


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
