"""Running batch: a decoding request is only visited in the steps in which it needs a block."""

from __future__ import annotations

import pytest

from baton.core.ids import BlockId
from baton.engine.plan import Plan
from baton.engine.scheduler.prompt_budget import StepLoad
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.running_batch import RunningBatch
from baton.kv_transfer.types import KvOrders
from tests.support.requests import make_request


def test_a_request_is_due_in_the_step_that_finds_its_blocks_full() -> None:
    batch = RunningBatch(num_slots_per_decode=1)
    request = _decoding(batch, num_computed=5, capacity=8)

    due = [_step(batch, request) for _ in range(4)]

    assert due == [[], [], [], [request]]


def test_a_full_table_is_due_in_the_next_step() -> None:
    batch = RunningBatch(num_slots_per_decode=1)
    request = _decoding(batch, num_computed=8, capacity=8)

    assert batch.begin_step() == [request]


@pytest.mark.parametrize("num_accepted", [1, 2, 3, 4])
def test_with_speculation_a_request_is_due_before_its_slots_run_out(num_accepted: int) -> None:
    batch = RunningBatch(num_slots_per_decode=4)
    request = _decoding(batch, num_computed=3, capacity=32)

    for _ in range(20):
        due = batch.begin_step()
        if due:
            break
        assert request.kv.num_computed_tokens + 4 <= 32
        request.kv.num_computed_tokens += num_accepted

    assert due == [request]


def test_a_request_short_of_draft_token_slots_is_due_in_every_step() -> None:
    batch = RunningBatch(num_slots_per_decode=4)
    request = _decoding(batch, num_computed=7, capacity=8)

    due = []
    for _ in range(3):
        due.append(batch.begin_step())
        batch.grow(request, ((),), capacity=8)

    assert due == [[request]] * 3


@pytest.mark.parametrize("num_slots_per_decode", [1, 4, 40])
def test_a_request_with_all_slots_allocated_is_never_due(num_slots_per_decode: int) -> None:
    batch = RunningBatch(num_slots_per_decode)
    _decoding(batch, num_computed=13, capacity=16, max_tokens=4)

    assert [batch.begin_step() for _ in range(40)] == [[]] * 40


def test_a_removed_request_is_not_due() -> None:
    batch = RunningBatch(num_slots_per_decode=1)
    request = _decoding(batch, num_computed=8, capacity=8)

    batch.remove(request)

    assert batch.begin_step() == []


def test_a_request_removed_and_added_again_is_due_once() -> None:
    batch = RunningBatch(num_slots_per_decode=1)
    request = _decoding(batch, num_computed=8, capacity=8)
    batch.remove(request)
    batch.start_prefill(request, 8)
    batch.turn_to_decode(request, 8)

    assert batch.begin_step() == [request]


def test_due_requests_are_ordered_by_rank() -> None:
    batch = RunningBatch(num_slots_per_decode=1)
    late = _decoding(batch, num_computed=8, capacity=8, serial=2)
    early = _decoding(batch, num_computed=8, capacity=8, serial=1)

    assert batch.begin_step() == [early, late]


def test_changes_are_in_one_plan_only() -> None:
    batch = RunningBatch(num_slots_per_decode=1)
    request = _decoding(batch, num_computed=8, capacity=8)
    _end_plan(batch)
    batch.begin_step()
    batch.grow(request, ((BlockId(5),),), capacity=12)

    first, second = _end_plan(batch), _end_plan(batch)

    assert first.new_block_ids == {request.request_id: ((5,),)}
    assert second.new_block_ids == {}
    assert second.num_scheduled_tokens == {request.request_id: 1}


def _decoding(
    batch: RunningBatch, *, num_computed: int, capacity: int, serial: int = 0, max_tokens: int = 100
) -> Request:
    prompt = range(1, num_computed + 1)
    request = make_request(prompt, request_id=f"r{serial}", serial=serial, max_tokens=max_tokens)
    batch.start_prefill(request, num_computed)
    request.kv.num_computed_tokens = num_computed
    batch.turn_to_decode(request, capacity)
    return request


def _end_plan(batch: RunningBatch) -> Plan:
    """Take the plan of a step, and apply its result."""
    plan = batch.take_plan(batch.decodes(), StepLoad(1, 0), KvOrders())
    batch.pending.clear()
    return plan


def _step(batch: RunningBatch, request: Request) -> list[Request]:
    """Run a step in which the request gets one token; return the requests that are due."""
    due = batch.begin_step()
    request.kv.num_computed_tokens += 1
    return due
