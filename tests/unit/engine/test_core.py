"""Engine step, and the time that the loop may sleep after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.ids import HandoffId, RequestId
from baton.core.request import PREFETCH
from baton.engine.plan import Plan
from baton.engine.scheduler.prompt_budget import MAX_LOOKED_UP_TOKENS
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.external_kv import ExternalReports, StoreId
from baton.kv_transfer.types import NO_REPORTS, KvReports
from tests.support.engines import VOCAB_SIZE, an_engine, an_engine_request
from tests.support.fake_runner import tokens_alone
from tests.support.scheduler_state import is_idle


class Patient(KvDriver):
    """Driver that requests a poll at an interval."""

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s

    def next_poll_s(self, now: float) -> float | None:
        return self._interval_s


def test_a_request_gets_one_token_per_step() -> None:
    engine = an_engine()
    engine.scheduler.add(an_engine_request(prompt=(5, 6, 7), max_tokens=3))

    steps = [engine.step() for _ in range(4)]

    tokens = [output.token_ids for outputs in steps for output in outputs]
    assert [len(outputs) for outputs in steps] == [1, 1, 1, 0]
    assert [one for (one,) in tokens] == tokens_alone((5, 6, 7), 0, 3, VOCAB_SIZE)
    engine.scheduler.check()


def test_a_step_with_work_is_followed_by_the_next_at_once() -> None:
    engine = an_engine()
    engine.scheduler.add(an_engine_request())

    engine.step()

    assert engine.max_idle_s() == 0.0


def test_a_plan_that_only_drops_rows_is_not_empty() -> None:
    # The blocks of the preempted request are available in the next step.
    plan = Plan(dropped=(RequestId("preempted"),))

    assert not plan.is_empty
    assert Plan().is_empty


def test_an_engine_does_not_sleep_while_prefetches_are_pending() -> None:
    engine = an_engine(num_blocks=4096)
    num_prefetches = 20
    for number in range(num_prefetches):
        prompt = tuple([1] * (MAX_LOOKED_UP_TOKENS // 8))
        engine.scheduler.add(replace(an_engine_request(str(number), prompt=prompt), task=PREFETCH))
    num_ended = 0
    while num_ended < num_prefetches:
        num_ended += len(engine.step())
        if num_ended < num_prefetches:
            assert engine.max_idle_s() == 0.0

    assert is_idle(engine.scheduler)


def test_an_idle_engine_sleeps_until_an_action_is_posted() -> None:
    engine = an_engine()

    engine.step()

    assert engine.max_idle_s() is None


def test_an_idle_engine_polls_at_the_shortest_interval_of_its_drivers() -> None:
    intervals_s = None, 0.2, 0.005
    engine = an_engine(drivers=[Patient(each) for each in intervals_s])

    engine.step()

    assert engine.max_idle_s() == 0.005


def test_a_step_applies_the_reports_of_all_drivers() -> None:
    of_wire = KvReports(granted=(HandoffId("a", 0),))
    of_tiers = KvReports(external=ExternalReports(stored=(StoreId(1),)))

    assert NO_REPORTS.joined(of_wire) is of_wire
    assert of_wire.joined(NO_REPORTS) is of_wire
    assert of_wire.joined(of_tiers) == replace(of_wire, external=of_tiers.external)
    assert of_tiers.joined(of_wire) == replace(of_wire, external=of_tiers.external)


def test_kv_orders_raise_in_an_engine_without_transport() -> None:
    engine = an_engine()
    engine.scheduler.add(replace(an_engine_request(), send_to=HandoffId("a", 0)))

    engine.step()  # computes the prompt, whose KV is to be sent

    with pytest.raises(RuntimeError, match="no KV transport"):
        engine.step()
