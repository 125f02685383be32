"""HTTP request bodies: their weight is counted on arrival and limited in total."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from baton.router.byte_budget import ByteBudget, Lease
from baton.router.http.bodies import (
    MAX_VALUES,
    ONE_AT_A_TIME,
    PRODUCTS_PER_BYTE,
    SMALL_BODY_BYTES,
    VALUE_BYTES,
    JsonGauge,
    ReceivedBody,
    max_values,
    read_body,
)
from baton.router.input_processing.tokenization import LargeTexts
from baton.rpc.errors import BodyTimeout, MessageTooLarge, QueueFull

LARGE = SMALL_BODY_BYTES + 1
marks = st.sampled_from(list('ab,:[{}]"\\é'))
texts = st.lists(marks, max_size=6).map("".join)
documents = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


def weight_of(value: Any) -> int:
    """Return the weight of a JSON value, including its contents."""
    if isinstance(value, list):
        return 4 + max(0, len(value) - 1) + sum(map(weight_of, value))
    if isinstance(value, dict):
        return 4 + max(0, len(value) - 1) + 3 * len(value) + sum(map(weight_of, value.values()))
    return 0


@given(documents, st.booleans(), st.integers(1, 7))
def test_the_gauge_ignores_punctuation_in_strings_for_any_split_of_a_body(
    document: Any, is_ascii: bool, size: int
) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii).encode()
    gauge = JsonGauge()

    for first in range(0, len(body), size):
        gauge.feed(body[first : first + size])

    assert gauge.num_values == 1 + weight_of(document)


def test_the_gauge_refuses_a_list_before_its_end() -> None:
    gauge = JsonGauge(max_values=1000)

    with pytest.raises(MessageTooLarge, match="more than 1000 JSON values"):
        gauge.feed(b"[" + b"5," * 1000)


def test_the_largest_allowed_prompts_fit_into_a_body() -> None:
    assert max_values(1024) > 128 * 1024
    assert max_values(10**6) == max_values(None) == MAX_VALUES


def a_request(chunks: AsyncIterator[bytes]) -> Request:
    async def receive() -> dict[str, Any]:
        chunk = await anext(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def read(budget: ByteBudget, *chunks: bytes) -> bytes:
    async def run() -> bytes:
        with budget.lease() as lease:
            return await read_body(a_request(chunks_of(*chunks)), lease, JsonGauge())

    return asyncio.run(run())


def test_large_bodies_in_flight_share_a_limit_and_small_ones_are_exempt() -> None:
    budget = ByteBudget(2 * LARGE)
    held = LARGE + VALUE_BYTES

    with budget.lease() as lease:
        lease.grow_to(held)
        with pytest.raises(QueueFull, match="send this one later") as refused:
            read(budget, b"x" * LARGE)
        assert refused.value.retry_after_s > 0
        assert read(budget, b"x" * SMALL_BODY_BYTES) == b"x" * SMALL_BODY_BYTES
        assert budget.num_held == held
    assert budget.num_held == 0
    assert len(read(budget, b"x" * LARGE)) == LARGE


def test_values_are_weighted_by_their_parsed_size() -> None:
    budget = ByteBudget(VALUE_BYTES * LARGE // 2)

    assert read(budget, b"x" * LARGE)
    with pytest.raises(QueueFull):
        read(budget, b"5," * LARGE)
    assert budget.num_held == 0


def test_waiting_for_a_body_times_out() -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def run() -> None:
        with ByteBudget().lease() as lease:
            await read_body(a_request(never()), lease, JsonGauge(), timeout_s=0)

    with pytest.raises(BodyTimeout, match="came within 0 s"):
        asyncio.run(run())


def test_what_is_read_from_a_body_counts_as_the_body_does() -> None:
    thread, budget = LargeTexts(ONE_AT_A_TIME), ByteBudget(max_bytes=LARGE)
    with budget.lease() as lease:
        body = ReceivedBody(b"x", thread, lease)
        body.hold_more(LARGE)
        assert asyncio.run(body.run(threading.get_ident)) != threading.get_ident()
        with pytest.raises(QueueFull, match="large bodies"):
            body.hold_more(1)
    assert budget.num_held == 0


def test_json_that_is_parsed_with_a_body_counts_as_the_body_does() -> None:
    thread, budget = LargeTexts(ONE_AT_A_TIME), ByteBudget(max_bytes=10 * LARGE)
    small, large, heavy = b"[5]", b'"' + b"x" * LARGE + b'"', b"[" + b"5," * LARGE + b"5]"

    async def held_for(value: bytes) -> int:
        with budget.lease() as lease:
            await ReceivedBody(b"x", thread, lease).hold_json(value)
            return budget.num_held

    assert asyncio.run(held_for(small)) == 0
    assert asyncio.run(held_for(large)) == len(large) + VALUE_BYTES
    with pytest.raises(QueueFull, match="large bodies"):
        asyncio.run(held_for(heavy))
    assert budget.num_held == 0


def test_large_bodies_are_parsed_outside_the_event_loop() -> None:
    thread, lease = LargeTexts(ONE_AT_A_TIME), Lease(ByteBudget())

    body = ReceivedBody(b"x" * SMALL_BODY_BYTES, thread, lease)
    small = asyncio.run(body.run(threading.get_ident))
    large = asyncio.run(ReceivedBody(b"x" * LARGE, thread, lease).run(threading.get_ident))

    assert small == threading.get_ident() != large


def test_large_computations_run_outside_the_event_loop_even_for_small_bodies() -> None:
    body = ReceivedBody(b"x", LargeTexts(ONE_AT_A_TIME), Lease(ByteBudget()))
    num_products = PRODUCTS_PER_BYTE * SMALL_BODY_BYTES

    small = asyncio.run(body.compute(num_products, threading.get_ident))
    large = asyncio.run(body.compute(2 * num_products, threading.get_ident))

    assert small == threading.get_ident() != large
