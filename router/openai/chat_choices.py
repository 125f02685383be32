"""One choice of a chat, in a stream or as a whole: what is read out of its text, as JSON."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from engine.request import FinishReason
from router.openai.asking import Telling
from router.openai.choices import Json, how_ended, joined
from router.openai.logprobs import Spell, chat_logprobs
from router.openai.parsing import Delta, Reader, ToolCall
from router.openai.tool_choice import Calling
from router.values import Ending, Piece

ID_BYTES = 12


class ChatChoice:
    def __init__(self, index: int, telling: Telling, spell: Spell, reader: Reader) -> None:
        self._index = index
        self._telling = telling
        self._spell = spell
        self._reader = reader
        self._num_calls = 0
        self._has_begun = False

    def chunk(self, piece: Piece) -> Json | None:
        delta = self._delta(self._reader.push(piece.text))
        told = self._beside(piece)
        if not self._has_begun:
            delta = {"role": "assistant", "content": "", **delta}
        elif not (delta or told["logprobs"] or "token_ids" in told):
            return None
        self._has_begun = True
        return {"index": self._index, "delta": delta, **told, "finish_reason": None}

    def last_chunk(self, ending: Ending) -> Json:
        delta = self._delta(self._reader.finish(is_cut_off=_is_cut_off(ending)))
        return {"index": self._index, "delta": delta, "logprobs": None, **self._how_ended(ending)}

    def whole(self, pieces: Sequence[Piece], ending: Ending) -> Json:
        piece = joined(pieces)
        told = self._reader.push(piece.text)
        told += self._reader.finish(is_cut_off=_is_cut_off(ending))
        message: Json = {"role": "assistant", "content": told.content, "refusal": None}
        if told.reasoning:
            message["reasoning_content"] = told.reasoning
        if told.calls:
            message["content"] = told.content or None
            message["tool_calls"] = [self._call(call) for call in told.calls]
        beside = {**self._beside(piece), **self._how_ended(ending)}
        return {"index": self._index, "message": message, **beside}

    def _delta(self, told: Delta) -> Json:
        """What is new, and nothing else."""
        delta: Json = {}
        if told.reasoning:
            delta["reasoning_content"] = told.reasoning
        if told.content:
            delta["content"] = told.content
        if told.calls:
            delta["tool_calls"] = [self._part(call) for call in told.calls]
        return delta

    def _part(self, call: ToolCall) -> Json:
        """A call of a stream, or more of the last one's arguments."""
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

    def _how_ended(self, ending: Ending) -> Json:
        """OpenAI and vLLM say "stop" where the function was named by the client."""
        how = how_ended(ending)
        calling = self._telling.calling
        is_whole = calling is Calling.BY_MODEL or ending.finish.stop_string is None
        has_called = self._num_calls > 0 and is_whole and calling is not Calling.NAMED
        if has_called and how["finish_reason"] == "stop":
            how["finish_reason"] = "tool_calls"
        return how

    def _beside(self, piece: Piece) -> Json:
        """What is told beside the text."""
        num_top, told = self._telling.num_logprobs, None
        if num_top is not None and piece.logprobs:
            told = chat_logprobs(piece.logprobs, num_top, self._spell)
        if self._telling.with_token_ids:
            return {"logprobs": told, "token_ids": piece.token_ids}
        return {"logprobs": told}


def _is_cut_off(ending: Ending) -> bool:
    return ending.finish.reason is FinishReason.LENGTH
