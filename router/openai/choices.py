"""One choice of an answer, in a stream or as a whole: pieces to JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kv_transfer.types import TokenLogprobs
from router.openai.asking import Telling
from router.openai.logprobs import Spell, completion_logprobs, prompt_logprobs
from router.values import Ending, Piece

Json = dict[str, Any]
NOTHING = Piece(0)


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """What of the prompt the answer may repeat."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


class Choice(Protocol):
    def chunk(self, piece: Piece) -> Json | None:
        """None: there is nothing to tell yet."""
        ...

    def last_chunk(self, ending: Ending) -> Json: ...

    def whole(self, pieces: Sequence[Piece], ending: Ending) -> Json: ...


class CompletionChoice:
    def __init__(self, index: int, prompt: ToldPrompt, telling: Telling, spell: Spell) -> None:
        self._index = index
        self._telling = telling
        self._prompt = prompt
        self._spell = spell
        self._offset = 0  # of the next token, in the text
        self._has_begun = False

    def chunk(self, piece: Piece) -> Json | None:
        told = self._told(piece)
        is_first, self._has_begun = not self._has_begun, True
        if not (is_first or told["text"] or told["logprobs"] or "token_ids" in told):
            return None
        if is_first and self._telling.with_token_ids:
            told["prompt_token_ids"] = self._prompt.token_ids
        return {**told, "finish_reason": None, "stop_reason": None}

    def last_chunk(self, ending: Ending) -> Json:
        return {"index": self._index, "text": "", "logprobs": None, **how_ended(ending)}

    def whole(self, pieces: Sequence[Piece], ending: Ending) -> Json:
        piece = joined(pieces)
        told = {**self._told(piece), **how_ended(ending)}
        num_top = self._telling.num_prompt_logprobs
        if num_top is not None:
            told["prompt_logprobs"] = prompt_logprobs(piece.prompt_logprobs, num_top, self._spell)
        if self._telling.with_token_ids:
            told["prompt_token_ids"] = self._prompt.token_ids
        return told

    def _told(self, piece: Piece) -> Json:
        telling = self._telling
        echoes = telling.echoes and not self._has_begun
        text = piece.text if telling.with_answer else ""
        told: Json = {
            "index": self._index,
            "text": self._prompt.text + text if echoes else text,
            "logprobs": self._logprobs(piece, echoes=echoes),
        }
        if telling.with_token_ids:
            told["token_ids"] = piece.token_ids if telling.with_answer else ()
        return told

    def _logprobs(self, piece: Piece, *, echoes: bool) -> Json | None:
        num_top = self._telling.num_logprobs
        if num_top is None:
            return None
        token_ids: tuple[int, ...] = ()
        entries: tuple[TokenLogprobs | None, ...] = ()
        if echoes:
            token_ids, entries = self._prompt.token_ids, piece.prompt_logprobs
        if self._telling.with_answer:
            token_ids, entries = (*token_ids, *piece.token_ids), (*entries, *piece.logprobs)
        if not token_ids:
            return None
        told = completion_logprobs(token_ids, entries, num_top, self._spell, self._offset)
        self._offset += sum(map(len, told["tokens"]))
        return told


def how_ended(ending: Ending) -> Json:
    finish = ending.finish
    stopped_by = finish.stop_string if finish.stop_token_id is None else finish.stop_token_id
    return {"finish_reason": finish.reason.value, "stop_reason": stopped_by}


def joined(pieces: Iterable[Piece]) -> Piece:
    """All of them as one."""
    pieces = list(pieces)
    return Piece(
        first_index=0,
        token_ids=tuple(token_id for one in pieces for token_id in one.token_ids),
        text="".join(one.text for one in pieces),
        logprobs=tuple(entry for one in pieces for entry in one.logprobs),
        prompt_logprobs=tuple(entry for one in pieces for entry in one.prompt_logprobs),
    )
