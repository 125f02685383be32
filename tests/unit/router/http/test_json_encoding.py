"""JSON encoding of large answers in slices: same bytes, without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from baton.checkpoint.tokenizer import TokenText
from baton.core.output import TokenLogprobs
from baton.router.doors.openai.response.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from baton.router.http.json_encoding import SLICE_CHARACTERS, LazyArray, as_json, encode_in_slices

TOP = tuple((token_id, -float(token_id)) for token_id in range(64))


def entries_of(count: int) -> list[TokenLogprobs | None]:
    return [TokenLogprobs(place % 50, -0.5, 1, TOP) for place in range(count)]


def token_text(token_id: int) -> TokenText:
    return TokenText(f"t{token_id}", f"t{token_id}".encode())


def answer_of(num_positions: int) -> dict[str, Any]:
    entries = entries_of(num_positions)
    token_ids = list(range(num_positions))
    choices = [
        {"text": "é", "logprobs": completion_logprobs(token_ids, entries, 64, token_text, 0)},
        {"logprobs": chat_logprobs([one for one in entries if one], 64, token_text)},
        {"prompt_logprobs": prompt_logprobs([None, *entries], 64, token_text)},
    ]
    return {"id": "a", "choices": LazyArray(iter(choices), has_long_items=True), "usage": None}


def test_json_encoded_in_slices_equals_the_whole() -> None:
    small = {**answer_of(3), "choices": list(answer_of(3)["choices"].items)}

    assert b"".join(asyncio.run(encode_in_slices(answer_of(3)))) == as_json(small)
    large = json.loads(b"".join(asyncio.run(encode_in_slices(answer_of(1000)))))
    assert large["choices"][2]["prompt_logprobs"][:2] == [
        None,
        json.loads(as_json(small))["choices"][2]["prompt_logprobs"][1],
    ]
    assert [len(large["choices"][0]["logprobs"][key]) for key in ("tokens", "top_logprobs")] == [
        1000,
        1000,
    ]


def test_the_event_loop_runs_while_a_large_answer_is_encoded() -> None:
    num_turns = 0

    async def write() -> list[bytes]:
        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        slices = await encode_in_slices(answer_of(1000))
        counting.cancel()
        return slices

    slices = asyncio.run(write())

    assert num_turns >= len(slices) - 1 > 20
    assert max(map(len, slices)) < 2 * SLICE_CHARACTERS
