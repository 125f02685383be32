"""One choice of a chat as JSON, in a stream or as a whole, with reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from baton.core.output import FinishReason
from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.doors.openai.request.tool_choice import ToolCallMode
from baton.router.doors.openai.response.choices import finish_fields, join_chunks
from baton.router.doors.openai.response.logprobs import TokenSpeller, chat_logprobs
from baton.router.http.json_encoding import Json
from baton.router.text_events.output_parsers import Delta, OutputParser, ToolCall
from baton.router.values import CompletionSummary, TokenChunk

ID_BYTES = 12


class ChatChoice:
    def __init__(
        self, index: int, options: ResponseOptions, spell: TokenSpeller, reader: OutputParser
    ) -> None:
        self._index = index
        self._options = options
        self._spell = spell
        self._reader = reader
        self._num_calls = 0
        self._has_begun = False

    def chunk(self, piece: TokenChunk) -> Json | None:
        delta = self._delta(self._reader.push(piece.text))
        extra = self._extra_fields(piece)
        if not self._has_begun:
            delta = {"role": "assistant", "content": "", **delta}
        elif not (delta or extra["logprobs"] or "token_ids" in extra):
            return None
        self._has_begun = True
        return {"index": self._index, "delta": delta, **extra, "finish_reason": None}

    def last_chunk(self, ending: CompletionSummary) -> Json:
        delta = self._delta(self._reader.finish(is_cut_off=_is_cut_off(ending)))
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            **self._finish_fields(ending),
        }

    def whole(self, pieces: Sequence[TokenChunk], ending: CompletionSummary) -> Json:
        piece = join_chunks(pieces)
        parsed = self._reader.push(piece.text)
        parsed += self._reader.finish(is_cut_off=_is_cut_off(ending))
        message: Json = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [self._call(call) for call in parsed.calls]
        extra = {**self._extra_fields(piece), **self._finish_fields(ending)}
        return {"index": self._index, "message": message, **extra}

    def _delta(self, parsed: Delta) -> Json:
        """Return the non-empty fields of a delta."""
        delta: Json = {}
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.calls:
            delta["tool_calls"] = [self._part(call) for call in parsed.calls]
        return delta

    def _part(self, call: ToolCall) -> Json:
        """Return a call of a stream, or more arguments of the last call."""
        if call.name is None:
            return {"index": self._num_calls - 1, "function": {"arguments": call.arguments}}
        return {"index": self._num_calls, **self._call(call)}

    def _call(self, call: ToolCall) -> Json:
        self._num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "id": f"call_{secrets.token_hex(ID_BYTES)}",
            "type": "function",
            "function": function,
        }

    def _finish_fields(self, ending: CompletionSummary) -> Json:
        """Return the finish reason. OpenAI and vLLM use "stop" if the client named the function."""
        how = finish_fields(ending, self._options.stop_token_ids)
        tool_call_mode = self._options.tool_call_mode
        is_whole = tool_call_mode is ToolCallMode.BY_MODEL or ending.finish.stop_string is None
        has_called = self._num_calls > 0 and is_whole and tool_call_mode is not ToolCallMode.NAMED
        if has_called and how["finish_reason"] == "stop":
            how["finish_reason"] = "tool_calls"
        return how

    def _extra_fields(self, piece: TokenChunk) -> Json:
        """Return the fields next to the text: logprobs and token ids."""
        num_top, logprobs = self._options.num_logprobs, None
        if num_top is not None and piece.logprobs:
            logprobs = chat_logprobs(piece.logprobs, num_top, self._spell)
        if self._options.with_token_ids:
            return {"logprobs": logprobs, "token_ids": piece.token_ids}
        return {"logprobs": logprobs}


def _is_cut_off(ending: CompletionSummary) -> bool:
    return ending.finish.reason is FinishReason.LENGTH
