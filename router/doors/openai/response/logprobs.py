"""Logprobs in the JSON formats of OpenAI and vLLM. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from baton.checkpoint.tokenizer import TokenText
from baton.core.output import TokenLogprobs
from baton.router.http.json_encoding import LazyArray
from baton.router.input_processing.limits import MAX_POSITIONS_PER_SLICE

LOWEST = -9999.0  # replaces -inf, which JSON lacks; the same value as in vLLM

TokenToText = Callable[[int], TokenText]
Position = TypeVar("Position")


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    num_top: int,
    token_text: TokenToText,
    offset: int,
) -> dict[str, Any]:
    """Return logprobs of the completions API: parallel lists. A prompt's first entry is None."""
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(token_text(token_id).text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "tokens": [token_text(token_id).text for token_id in token_ids],
        "top_logprobs": _map_positions(
            partial(_top_by_text, num_top=num_top, token_text=token_text), entries
        ),
    }


def _top_by_text(
    entry: TokenLogprobs | None, num_top: int, token_text: TokenToText
) -> dict[str, float] | None:
    """Return top logprobs by text, with the sampled token. Equal texts keep the likelier one."""
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
        top.setdefault(token_text(token_id).text, _finite(logprob))
    return top


def chat_logprobs(
    entries: Sequence[TokenLogprobs], num_top: int, token_text: TokenToText
) -> dict[str, Any]:
    position = partial(_chat_position, num_top=num_top, token_text=token_text)
    return {"content": _map_positions(position, entries), "refusal": None}


def _chat_position(entry: TokenLogprobs, num_top: int, token_text: TokenToText) -> dict[str, Any]:
    return {
        **_token(entry.token_id, entry.logprob, token_text),
        "top_logprobs": [_token(*top, token_text) for top in entry.top[:num_top]],
    }


def _token(token_id: int, logprob: float, token_text: TokenToText) -> dict[str, Any]:
    spelled = token_text(token_id)
    return {"token": spelled.text, "logprob": _finite(logprob), "bytes": list(spelled.raw)}


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], num_top: int, token_text: TokenToText
) -> list[Any] | LazyArray:
    """Return prompt logprobs by token id, in vLLM's format."""
    return _map_positions(partial(_ranked_by_id, num_top=num_top, token_text=token_text), entries)


def _ranked_by_id(
    entry: TokenLogprobs | None, num_top: int, token_text: TokenToText
) -> dict[str, Any] | None:
    if entry is None:
        return None
    ranked = enumerate(entry.top[:num_top], 1)
    top = [(token_id, logprob, rank) for rank, (token_id, logprob) in ranked]
    chosen = (entry.token_id, entry.logprob, entry.rank)
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": token_text(token_id).text,
        }
        for token_id, logprob, rank in (*top, chosen)
    }


def _map_positions(
    to_json: Callable[[Position], object], entries: Sequence[Position]
) -> list[Any] | LazyArray:
    """Return a list, or a LazyArray if building it at once would block the event loop."""
    positions: Iterable[object] = map(to_json, entries)
    return list(positions) if len(entries) <= MAX_POSITIONS_PER_SLICE else LazyArray(positions)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
