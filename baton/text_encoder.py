"""Texts of `LLM.embed` and `LLM.score` as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.checkpoint.tokenizer import FIELD, EncodedText, Tokenizer
from baton.core.errors import InvalidRequest

WHOLE_CONTEXT = -1


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Encodes texts, cut to `truncate_prompt_tokens` if it is given."""

    tokenizer: Tokenizer
    max_model_len: int
    truncate_prompt_tokens: int | None

    def text(self, text: str | Sequence[int]) -> EncodedText:
        if isinstance(text, str):
            return self.tokenizer.encode_text(text, None, self._limit)
        return EncodedText(tuple(text)[: self._limit])

    def pair(self, first: str, second: str) -> EncodedText:
        return self.tokenizer.encode_text(first, second, self._limit)

    @property
    def _limit(self) -> int | None:
        limit = self.truncate_prompt_tokens
        if limit is not None and limit < 1 and limit != WHOLE_CONTEXT:
            raise InvalidRequest(f"{FIELD} is {limit}; it must be at least 1, or -1", FIELD)
        return self.max_model_len if limit == WHOLE_CONTEXT else limit
