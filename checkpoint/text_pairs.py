"""Encodes texts and pairs of texts for embedders and rerankers."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from baton.core.errors import InvalidRequest

FIELD = "truncate_prompt_tokens"


class EncodedText(NamedTuple):
    """Tokens of a text, or of a pair of texts, with special tokens."""

    token_ids: tuple[int, ...]
    second_start: int = 0  # index of the first token of type 1; 0: there is none
    is_cut: bool = False


def encode_text(
    fast: FastTokenizer, text: str, second: str | None = None, max_tokens: int | None = None
) -> EncodedText:
    """Encode a text or a pair, with at most `max_tokens`: the longer text is cut at its end.

    Raises InvalidRequest if not even the special tokens fit.
    """
    parts = [
        fast.encode(each, add_special_tokens=False) for each in (text, second) if each is not None
    ]
    is_cut = False
    if max_tokens is not None:
        num_special = fast.num_special_tokens_to_add(second is not None)
        if max_tokens <= num_special:
            raise InvalidRequest(
                f"{FIELD} is {max_tokens}; this model adds {num_special} special tokens: it must "
                "be more",
                FIELD,
            )
        lens = [len(part.ids) for part in parts]
        for part, num_kept in zip(parts, _fit(lens, max_tokens - num_special), strict=True):
            part.truncate(num_kept)
        is_cut = sum(lens) > max_tokens - num_special
    encoded = fast.post_process(parts[0], parts[1] if len(parts) > 1 else None)
    types = encoded.type_ids
    return EncodedText(tuple(encoded.ids), types.index(1) if 1 in types else 0, is_cut)


def _fit(lens: list[int], limit: int) -> list[int]:
    """Shorten the longest text first, until the sum of the lengths is within the limit."""
    if len(lens) == 1 or sum(lens) <= limit:
        return [min(lens[0], limit), *lens[1:]]
    shorter = min(*lens, limit // 2)
    rest = limit - shorter
    return [shorter, rest] if lens[0] < lens[1] else [rest, shorter]
