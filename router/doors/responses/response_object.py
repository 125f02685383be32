"""Response objects and the events around output items. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

from baton.core.output import Finish, FinishReason
from baton.router.doors.openai.response.answers import tool_warnings
from baton.router.doors.responses.parsed_response import ParsedResponse
from baton.router.http.errors import HttpFailure
from baton.router.http.json_encoding import Json
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
from baton.router.values import AnswerPart, TokenChunk

FAILED = "failed"
UNENDED_CALL = "unended_tool_call"  # reason of an incomplete response, Baton's own
# Codes of errors in a response object. All others are the server's.
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
ID_BYTES = 12
NO_NAMESPACES: Mapping[str, tuple[str, str]] = {}
MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}
TEXTS = {MESSAGE: "output_text", REASONING: "reasoning_text"}
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class ResponseObject:
    """Response to one request, whole or streamed."""

    def __init__(
        self,
        parsed: ParsedResponse,
        response_id: str,
        created_at: int,
        model: str,
        text: TextBoundary,
    ) -> None:
        text_format = parsed.request.options.text_format
        self.id = response_id
        self._header = {
            "id": response_id,
            "object": "response",
            "created_at": created_at,
            "model": model,
        }
        self._echo = parsed.echo
        self._warnings = (
            *parsed.warnings,
            *tool_warnings(text_format, supports_tools=text.supports_tools),
        )
        self._reader = EventReader(text_format.parser, 1)
        self._items = OutputItems(parsed.namespaces)
        self._num_reasoning_tokens = 0
        self._num_events = 0

    @property
    def items(self) -> Sequence[Json]:
        return self._items.items

    def start(self) -> list[Json]:
        response = self._response(IN_PROGRESS)
        kinds = ("response.created", "response.in_progress")
        return self.numbered({"type": kind, "response": response} for kind in kinds)

    def events(self, part: AnswerPart) -> list[Json]:
        """Return the events of the next part, without the response's own."""
        texts = self._reader.read(0, part)
        events = list(self._items.events(texts))
        if isinstance(part, Finish):
            return [*events, *self._items.end(self._status(part))]
        self._count_reasoning(texts, part)
        return events

    def last_event(self, whole: Json) -> Json:
        return {"type": f"response.{whole['status']}", "response": whole}

    def whole(self, end: Finish, completed_at: int) -> Json:
        status = self._status(end)
        reason = "max_output_tokens" if end.reason is FinishReason.LENGTH else UNENDED_CALL
        warnings = list(dict.fromkeys((*self._warnings, *end.warnings)))
        return {
            **self._response(
                status,
                completed_at=completed_at if status == COMPLETED else None,
                incomplete_details={"reason": reason} if status == INCOMPLETE else None,
                usage=usage_of(end, self._num_reasoning_tokens),
            ),
            **({"warnings": warnings} if warnings else {}),
        }

    def failed(self, failure: HttpFailure) -> list[Json]:
        """Return the last event of a stream that fails after its first one."""
        code = CODES.get(failure.status, "server_error")
        error = {"code": code, "message": failure.message, "reason": failure.reason}
        response = self._response(FAILED, error=error)
        return self.numbered([{"type": "response.failed", "response": response}])

    def numbered(self, events: Iterable[Json]) -> list[Json]:
        """Return the events with their numbers, in the order in which they have to be sent."""
        numbered = [
            {**event, "sequence_number": number}
            for number, event in enumerate(events, self._num_events)
        ]
        self._num_events += len(numbered)
        return numbered

    def _response(self, status: str, **fields: object) -> Json:
        names = ("completed_at", "error", "incomplete_details", "usage")
        empty: Json = dict.fromkeys(names)
        return {
            **self._header,
            "status": status,
            "output": list(self._items.items),
            **self._echo,
            **empty,
            **fields,
        }

    def _status(self, end: Finish) -> str:
        is_cut_off = end.reason is FinishReason.LENGTH or self._items.has_unended_call
        return INCOMPLETE if is_cut_off else COMPLETED

    def _count_reasoning(self, texts: Sequence[TextEvent], chunk: TokenChunk) -> None:
        """Count the tokens of a part that is all reasoning; marks around it do not count."""
        if texts and all(isinstance(text, ReasoningDelta) for text in texts):
            self._num_reasoning_tokens += len(chunk.token_ids)


def usage_of(end: Finish, num_reasoning_tokens: int) -> Json:
    num_cached = end.num_cached_prompt_tokens or 0
    return {
        "input_tokens": end.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": end.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": end.num_prompt_tokens + end.num_completion_tokens,
    }


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
