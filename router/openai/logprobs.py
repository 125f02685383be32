"""Logprobs as OpenAI and vLLM write them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from baton.spelling import TokenText
from kv_transfer.types import TokenLogprobs
from router.openai.encoding import MAX_POSITIONS_AT_ONCE, LongList

LOWEST = -9999.0  # JSON has no infinity; vLLM writes this, too

Spell = Callable[[int], TokenText]
Position = TypeVar("Position")


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    num_top: int,
    spell: Spell,
    offset: int,
) -> dict[str, Any]:
    """The form of the older API: lists side by side. The first token of a prompt has no entry."""
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(spell(token_id).text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in entries],
        "tokens": [spell(token_id).text for token_id in token_ids],
        "top_logprobs": _each(partial(_by_text, num_top=num_top, spell=spell), entries),
    }


def _by_text(entry: TokenLogprobs | None, num_top: int, spell: Spell) -> dict[str, float] | None:
    """The chosen token is always among them. Of two that look alike, the likelier stays."""
    if entry is None:
        return None
    told: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
        told.setdefault(spell(token_id).text, _finite(logprob))
    return told


def chat_logprobs(entries: Sequence[TokenLogprobs], num_top: int, spell: Spell) -> dict[str, Any]:
    position = partial(_of_chat, num_top=num_top, spell=spell)
    return {"content": _each(position, entries), "refusal": None}


def _of_chat(entry: TokenLogprobs, num_top: int, spell: Spell) -> dict[str, Any]:
    return {
        **_token(entry.token_id, entry.logprob, spell),
        "top_logprobs": [_token(*top, spell) for top in entry.top[:num_top]],
    }


def _token(token_id: int, logprob: float, spell: Spell) -> dict[str, Any]:
    spelled = spell(token_id)
    return {"token": spelled.text, "logprob": _finite(logprob), "bytes": list(spelled.raw)}


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], num_top: int, spell: Spell
) -> list[Any] | LongList:
    """By token id, as vLLM tells them."""
    return _each(partial(_by_id, num_top=num_top, spell=spell), entries)


def _by_id(entry: TokenLogprobs | None, num_top: int, spell: Spell) -> dict[str, Any] | None:
    if entry is None:
        return None
    ranked = enumerate(entry.top[:num_top], 1)
    told = [(token_id, logprob, rank) for rank, (token_id, logprob) in ranked]
    chosen = (entry.token_id, entry.logprob, entry.rank)
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": spell(token_id).text,
        }
        for token_id, logprob, rank in (*told, chosen)
    }


def _each(told: Callable[[Position], object], entries: Sequence[Position]) -> list[Any] | LongList:
    """A list, or a LongList where making it at once would hold up the event loop."""
    positions: Iterable[object] = map(told, entries)
    return list(positions) if len(entries) <= MAX_POSITIONS_AT_ONCE else LongList(positions)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
