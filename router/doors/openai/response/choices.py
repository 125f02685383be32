"""One choice of a completion as JSON, in a stream or as a whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.logprobs import TokenLogprobs
from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.doors.openai.response.logprobs import (
    TokenSpeller,
    completion_logprobs,
    prompt_logprobs,
)
from baton.router.http.json_encoding import Json
from baton.router.values import CompletionSummary, TokenChunk

NOTHING = TokenChunk(0)


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Parts of the prompt that the answer can repeat."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


class ResponseChoice(Protocol):
    def chunk(self, piece: TokenChunk) -> Json | None:
        """Return None if there is nothing to send yet."""
        ...

    def last_chunk(self, ending: CompletionSummary) -> Json: ...

    def whole(self, pieces: Sequence[TokenChunk], ending: CompletionSummary) -> Json: ...


class CompletionChoice:
    def __init__(
        self, index: int, prompt: EchoedPrompt, options: ResponseOptions, spell: TokenSpeller
    ) -> None:
        self._index = index
        self._options = options
        self._prompt = prompt
        self._spell = spell
        self._offset = 0  # of the next token in the text
        self._has_begun = False

    def chunk(self, piece: TokenChunk) -> Json | None:
        fields = self._fields(piece)
        is_first, self._has_begun = not self._has_begun, True
        if not (is_first or fields["text"] or fields["logprobs"] or "token_ids" in fields):
            return None
        if is_first and self._options.with_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        return {**fields, "finish_reason": None, "stop_reason": None}

    def last_chunk(self, ending: CompletionSummary) -> Json:
        return {"index": self._index, "text": "", "logprobs": None, **self._finish_fields(ending)}

    def whole(self, pieces: Sequence[TokenChunk], ending: CompletionSummary) -> Json:
        piece = join_chunks(pieces)
        fields = {**self._fields(piece), **self._finish_fields(ending)}
        num_top = self._options.num_prompt_logprobs
        if num_top is not None:
            fields["prompt_logprobs"] = prompt_logprobs(piece.prompt_logprobs, num_top, self._spell)
        if self._options.with_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        return fields

    def _finish_fields(self, ending: CompletionSummary) -> Json:
        return finish_fields(ending, self._options.stop_token_ids)

    def _fields(self, piece: TokenChunk) -> Json:
        options = self._options
        echoes = options.echoes and not self._has_begun
        text = piece.text if options.with_answer else ""
        fields: Json = {
            "index": self._index,
            "text": self._prompt.text + text if echoes else text,
            "logprobs": self._logprobs(piece, echoes=echoes),
        }
        if options.with_token_ids:
            fields["token_ids"] = piece.token_ids if options.with_answer else ()
        return fields

    def _logprobs(self, piece: TokenChunk, *, echoes: bool) -> Json | None:
        num_top = self._options.num_logprobs
        if num_top is None:
            return None
        token_ids: tuple[int, ...] = ()
        entries: tuple[TokenLogprobs | None, ...] = ()
        if echoes:
            token_ids, entries = self._prompt.token_ids, piece.prompt_logprobs
        if self._options.with_answer:
            token_ids, entries = (*token_ids, *piece.token_ids), (*entries, *piece.logprobs)
        if not token_ids:
            return None
        logprobs = completion_logprobs(token_ids, entries, num_top, self._spell, self._offset)
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs


def finish_fields(ending: CompletionSummary, stop_token_ids: Sequence[int]) -> Json:
    """Return the finish reason, and the stop string or stop token of the request that ended it."""
    finish = ending.finish
    is_requested = finish.stop_token_id in stop_token_ids
    stopped_by = finish.stop_token_id if is_requested else finish.stop_string
    return {"finish_reason": finish.reason.value, "stop_reason": stopped_by}


def join_chunks(pieces: Iterable[TokenChunk]) -> TokenChunk:
    """Concatenate the pieces."""
    pieces = list(pieces)
    return TokenChunk(
        first_index=0,
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        text="".join(piece.text for piece in pieces),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        prompt_logprobs=tuple(entry for piece in pieces for entry in piece.prompt_logprobs),
    )
