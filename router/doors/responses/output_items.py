"""Output items of an answer, as events of a stream and as a whole. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
)

ID_BYTES = 12
NO_NAMESPACES: Mapping[str, tuple[str, str]] = {}
MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}
TEXTS = {MESSAGE: "output_text", REASONING: "reasoning_text"}
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class OutputItems:
    """Turns the text events of one answer into events of output items."""

    def __init__(self, namespaces: Mapping[str, tuple[str, str]] = NO_NAMESPACES) -> None:
        """`namespaces` are namespace and name of functions by the model's name for them."""
        self._namespaces = namespaces
        self.items: list[Json] = []  # that have ended
        self._index = -1  # of the current item
        self._item: Json = {}  # the current one; empty: none
        self._texts: list[str] = []  # of the current item
        self.has_unended_call = False

    def events(self, texts: Sequence[TextEvent]) -> Iterator[Json]:
        for event in texts:
            match event:
                case TextDelta():
                    yield from self._add_text(MESSAGE, event.text)
                case ReasoningDelta():
                    yield from self._add_text(REASONING, event.text)
                case ToolCall():
                    yield from self._begin(_call(event.name, self._namespaces.get(event.name)))
                    if event.arguments:
                        yield self._add_arguments(event.arguments)
                case ArgumentsDelta():
                    yield self._add_arguments(event.arguments)
                case CallEnd():
                    yield from self._end(COMPLETED)

    def end(self, status: str = COMPLETED) -> Iterator[Json]:
        """End the current item. A call that has not ended is left out: clients would run it."""
        if self._item.get("type") == CALL:
            self.has_unended_call = True
            self._item, self._texts = {}, []
        if self._item:
            yield from self._end(status)

    def _end(self, status: str) -> Iterator[Json]:
        text = "".join(self._texts)
        item = {**self._item, "status": status}
        if item["type"] == CALL:
            item["arguments"] = text
            done = self._place(name=item["name"], arguments=text)
            yield {"type": "response.function_call_arguments.done", **done}
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            done = self._place(content_index=0, text=text)
            yield {"type": f"response.{part['type']}.done", **done, **_logprobs(item["type"])}
            done = self._place(content_index=0, part=part)
            yield {"type": "response.content_part.done", **done}
        self.items.append(item)
        self._item, self._texts = {}, []
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def _add_text(self, kind: str, text: str) -> Iterator[Json]:
        if self._item.get("type") != kind:
            yield from self._begin(_text_item(kind))
            added = self._place(content_index=0, part=_part(kind, ""))
            yield {"type": "response.content_part.added", **added}
        self._texts.append(text)
        delta = self._place(content_index=0, delta=text)
        yield {"type": f"response.{TEXTS[kind]}.delta", **delta, **_logprobs(kind)}

    def _begin(self, item: Json) -> Iterator[Json]:
        yield from self.end()
        self._item = item
        self._index += 1
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}

    def _add_arguments(self, arguments: str) -> Json:
        self._texts.append(arguments)
        place = self._place(delta=arguments)
        return {"type": "response.function_call_arguments.delta", **place}

    def _place(self, **fields: object) -> Json:
        return {"item_id": self._item["id"], "output_index": self._index, **fields}


def _new_item(kind: str) -> Json:
    identity = f"{PREFIXES[kind]}_{secrets.token_hex(ID_BYTES)}"
    return {"id": identity, "type": kind, "status": IN_PROGRESS}


def _text_item(kind: str) -> Json:
    more: Json = {"role": "assistant"} if kind == MESSAGE else {"summary": []}
    return {**_new_item(kind), **more, "content": []}


def _call(name: str, full_name: tuple[str, str] | None) -> Json:
    call_id = f"call_{secrets.token_hex(ID_BYTES)}"
    item = {**_new_item(CALL), "call_id": call_id, "name": name, "arguments": ""}
    if full_name is None:
        return item
    return {**item, "namespace": full_name[0], "name": full_name[1]}


def _part(kind: str, text: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if kind == MESSAGE else {}
    return {"type": TEXTS[kind], "text": text, **more}


def _logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == MESSAGE else {}
