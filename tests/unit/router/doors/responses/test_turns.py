"""Turns of a conversation: what is stored of it weighs on the router as a body does."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from baton.router.byte_budget import ByteBudget
from baton.router.doors.responses.store import ResponseStore, StoredResponse, TenantMemory
from baton.router.doors.responses.turns import begin_turn
from baton.router.http.bodies import ONE_AT_A_TIME, ReceivedBody
from baton.router.http.exchange import ReceivedRequest
from baton.router.input_processing.tokenization import LargeTexts
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestScopes
from baton.rpc.errors import QueueFull
from tests.support.node_calls import FakeNodeCalls, a_table
from tests.support.profiles import profiles_of

HISTORY = json.dumps([{"role": "user", "content": "x" * (1 << 20)}]).encode()
CONTINUED = {"input": "hi", "previous_response_id": "stored"}


def a_pipeline() -> Pipeline:
    table = a_table()
    return Pipeline(
        table=table,
        node_calls=FakeNodeCalls(),
        profiles=profiles_of(table),
        clock=time.monotonic,
        config=PipelineConfig(),
    )


def a_memory() -> TenantMemory:
    store = ResponseStore()
    store.put("", "stored", StoredResponse(b"", HISTORY, time.monotonic()))
    return TenantMemory(store, "")


def test_the_history_of_each_request_counts_in_the_budget_of_bodies() -> None:
    budget = ByteBudget(max_bytes=2 * len(HISTORY))

    async def continue_with(num_others: int) -> None:
        with budget.lease() as lease:
            body = ReceivedBody(b"{}", LargeTexts(ONE_AT_A_TIME), lease)
            request = ReceivedRequest("id", "", body, RequestScopes().begin("id", None))
            turn = await begin_turn(a_pipeline(), CONTINUED, request, a_memory())
            assert len(json.loads(turn.parsed.conversation([]))) == 2
            assert budget.num_held >= (num_others + 1) * len(HISTORY)
            await continue_with(num_others + 1)

    with pytest.raises(QueueFull, match="large bodies of other requests take 1 of 2 MiB"):
        asyncio.run(continue_with(0))
    assert budget.num_held == 0
