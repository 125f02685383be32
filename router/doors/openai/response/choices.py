"""One choice of a completion as JSON, in a stream or as a whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.output import Finish, TokenLogprobs
from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.doors.openai.response.logprobs import (
    TokenToText,
    completion_logprobs,
    prompt_logprobs,
)
from baton.router.http.json_encoding import Json
from baton.router.text_events.events import AnswerText, TextEvent, fold
from baton.router.values import TokenChunk


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
