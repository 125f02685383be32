"""One choice of a completion or a chat as JSON, in a stream or as a whole. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.output import Finish, TokenLogprobs
from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.doors.openai.response.logprobs import (
    TokenToText,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from baton.router.http.json_encoding import Json
from baton.router.text_events.events import (
    AnswerText,
    ArgumentsDelta,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCall,
    fold,
)
from baton.router.text_events.parsing import ToolCallMode
from baton.router.values import TokenChunk

ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Parts of the prompt that the answer can repeat."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


class CompletionChoice:
    def __init__(
        self, index: int, prompt: EchoedPrompt, options: ResponseOptions, token_text: TokenToText
    ) -> None:
        self._index = index
        self._options = options
        self._prompt = prompt
        self._token_text = token_text
        self._offset = 0  # of the next token in the text
        self._has_begun = False

    def chunk(self, texts: Sequence[TextEvent], tokens: TokenChunk) -> Json | None:
        """Return None if there is nothing to send yet."""
        fields = self._fields(fold(texts).content, tokens)
        is_first, self._has_begun = not self._has_begun, True
        if not (is_first or fields["text"] or fields["logprobs"] or "token_ids" in fields):
            return None
        if is_first and self._options.with_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        return {**fields, "finish_reason": None, "stop_reason": None}

    def last_chunk(self, texts: Sequence[TextEvent], end: Finish) -> Json:
        text = fold(texts).content
        return {"index": self._index, "text": text, "logprobs": None, **self._finish_fields(end)}

    def whole(self, text: AnswerText, tokens: TokenChunk, end: Finish) -> Json:
        fields = {**self._fields(text.content, tokens), **self._finish_fields(end)}
        num_top = self._options.num_prompt_logprobs
        if num_top is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                tokens.prompt_logprobs, num_top, self._token_text
            )
        if self._options.with_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        return fields

    def _finish_fields(self, end: Finish) -> Json:
        return finish_fields(end, self._options.stop_token_ids)

    def _fields(self, text: str, tokens: TokenChunk) -> Json:
        options = self._options
        echoes = options.echoes and not self._has_begun
        text = text if options.with_answer else ""
        fields: Json = {
            "index": self._index,
            "text": self._prompt.text + text if echoes else text,
            "logprobs": self._logprobs(tokens, echoes=echoes),
        }
        if options.with_token_ids:
            fields["token_ids"] = tokens.token_ids if options.with_answer else ()
        return fields

    def _logprobs(self, tokens: TokenChunk, *, echoes: bool) -> Json | None:
        num_top = self._options.num_logprobs
        if num_top is None:
            return None
        token_ids: tuple[int, ...] = ()
        entries: tuple[TokenLogprobs | None, ...] = ()
        if echoes:
            token_ids, entries = self._prompt.token_ids, tokens.prompt_logprobs
        if self._options.with_answer:
            token_ids, entries = (*token_ids, *tokens.token_ids), (*entries, *tokens.logprobs)
        if not token_ids:
            return None
        logprobs = completion_logprobs(token_ids, entries, num_top, self._token_text, self._offset)
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs


def finish_fields(end: Finish, stop_token_ids: Sequence[int]) -> Json:
    """Return the finish reason, and the stop string or stop token of the request that ended it."""
    is_requested = end.stop_token_id in stop_token_ids
    stopped_by = end.stop_token_id if is_requested else end.stop_string
    return {"finish_reason": end.reason, "stop_reason": stopped_by}


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Concatenate the tokens, without their text, which has events of its own."""
    return TokenChunk(
        first_index=0,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt_logprobs=tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
    )


class ChatChoice:
    """One choice of a chat as JSON, in a stream or as a whole, with reasoning and tool calls."""

    def __init__(self, index: int, options: ResponseOptions, token_text: TokenToText) -> None:
        self._index = index
        self._options = options
        self._token_text = token_text
        self._num_calls = 0
        self._num_unended = 0
        self._has_begun = False

    def chunk(self, texts: Sequence[TextEvent], tokens: TokenChunk) -> Json | None:
        """Return None if there is nothing to send yet."""
        delta = self._delta(texts)
        extra = self._extra_fields(tokens)
        if not self._has_begun:
            delta = {"role": "assistant", "content": "", **delta}
        elif not (delta or extra["logprobs"] or "token_ids" in extra):
            return None
        self._has_begun = True
        return {"index": self._index, "delta": delta, **extra, "finish_reason": None}

    def last_chunk(self, texts: Sequence[TextEvent], end: Finish) -> Json:
        delta = self._delta(texts)
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            **self._finish_fields(end),
        }

    def whole(self, text: AnswerText, tokens: TokenChunk, end: Finish) -> Json:
        message: Json = {"role": "assistant", "content": text.content, "refusal": None}
        if text.reasoning:
            message["reasoning_content"] = text.reasoning
        if text.calls:
            message["content"] = text.content or None
            message["tool_calls"] = [self._call(call) for call in text.calls]
        self._num_unended = text.num_unended_calls
        extra = {**self._extra_fields(tokens), **self._finish_fields(end)}
        return {"index": self._index, "message": message, **extra}

    def _delta(self, texts: Sequence[TextEvent]) -> Json:
        """Return the fields of a delta, without empty ones."""
        delta: Json = {}
        for event in texts:
            match event:
                case TextDelta():
                    delta["content"] = delta.get("content", "") + event.text
                case ReasoningDelta():
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
                case ToolCall():
                    call = {"index": self._num_calls, **self._call(event)}
                    delta.setdefault("tool_calls", []).append(call)
                    self._num_unended += 1
                case ArgumentsDelta():
                    self._add_arguments(delta.setdefault("tool_calls", []), event.arguments)
                case CallEnd():
                    self._num_unended -= 1
        return delta

    def _add_arguments(self, calls: list[Json], arguments: str) -> None:
        """Add arguments to the last call, which may be one of an earlier chunk."""
        if calls:
            calls[-1]["function"]["arguments"] += arguments
        else:
            calls.append({"index": self._num_calls - 1, "function": {"arguments": arguments}})

    def _call(self, call: ToolCall) -> Json:
        self._num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "id": f"call_{secrets.token_hex(ID_BYTES)}",
            "type": "function",
            "function": function,
        }

    def _finish_fields(self, end: Finish) -> Json:
        """Return the finish reason, "tool_calls" only if all calls that began have ended.

        OpenAI and vLLM use "stop" if the client named the function.
        """
        how = finish_fields(end, self._options.stop_token_ids)
        is_named = self._options.text_format.tool_calls is ToolCallMode.NAMED
        has_called = self._num_calls > 0 and self._num_unended == 0 and not is_named
        if has_called and how["finish_reason"] == "stop":
            how["finish_reason"] = "tool_calls"
        return how

    def _extra_fields(self, tokens: TokenChunk) -> Json:
        """Return the fields next to the text: logprobs and token ids."""
        num_top, logprobs = self._options.num_logprobs, None
        if num_top is not None and tokens.logprobs:
            logprobs = chat_logprobs(tokens.logprobs, num_top, self._token_text)
        if self._options.with_token_ids:
            return {"logprobs": logprobs, "token_ids": tokens.token_ids}
        return {"logprobs": logprobs}
