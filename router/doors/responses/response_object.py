"""Response objects and the events around output items. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.finish import Finish
from baton.core.output import FinishReason
from baton.router.doors.openai.response.answers import tool_warnings
from baton.router.doors.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    OutputItems,
)
from baton.router.doors.responses.parsed_response import ParsedResponse
from baton.router.http.errors import HttpFailure
from baton.router.http.json_encoding import Json
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.text_events.events import EventReader, ReasoningDelta, TextEvent
from baton.router.values import AnswerPart, TokenChunk

FAILED = "failed"
UNENDED_CALL = "unended_tool_call"  # reason of an incomplete response, Baton's own
# Codes of errors in a response object. All others are the server's.
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


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
