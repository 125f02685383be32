"""Messages and stream events around the content of an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.finish import Finish
from baton.core.output import FinishReason
from baton.router.doors.messages.content import ContentBlocks, whole_content
from baton.router.doors.messages.parsed_message import ParsedMessage
from baton.router.doors.openai.response.answers import tool_warnings
from baton.router.http.json_encoding import Json, named_event
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.text_events.events import EventReader
from baton.router.values import AnswerPart


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
