"""Pulls of KV that a vLLM server holds for one request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv
from baton.core.ids import AdapterRef, RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.kv_arrival.arrivals import KvSources
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.foreign_kv import (
    ForeignPull,
    ForeignPulled,
    ForeignRelease,
)
from baton.kv_transfer.types import KvReports

BLOCK_SIZE = 4
NUM_BLOCKS = 16
PROMPT = tuple(range(14))
KV = ForeignKv("vllm", 5600, "engine", "cmpl-1", (7, 8), 14)
REQUEST = EngineRequest(
    RequestId("r"),
    PROMPT,
    SamplingParams(max_tokens=4),
    seed=1,
    arrival_s=100.0,
    age_s=2.0,
    foreign_kv=KV,
)


@dataclass
class FakeReader:
    """Server whose KV can be read if the request is younger than `max_age_s`."""

    max_age_s: float = 25.0
    asked: list[float] = field(default_factory=list)

    def allows(self, kv: ForeignKv) -> bool:
        return kv.host == "vllm"

    def may_read(self, kv: ForeignKv, received_s: float, now: float) -> bool:
        self.asked.append(received_s)
        return now < received_s + self.max_age_s


class World:
    def __init__(self, reader: FakeReader | None = None) -> None:
        self.reader = reader or FakeReader()
        cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(SchedulerConfig(), cache, KvSources(foreign=self.reader))

    def step(self, now: float, *pulled: ForeignPulled) -> Plan:
        """Run a step in which these pulls end. Each request samples token 50."""
        plan = self.scheduler.schedule(now)
        sampled = {row: [50] for row in plan.num_scheduled_tokens}
        self.scheduler.update(plan, RunResult(sampled), KvReports(foreign=pulled), now + 0.01)
        self.scheduler.check()
        return plan

    def begin(self, request: EngineRequest = REQUEST) -> ForeignPull:
        self.scheduler.add(request)
        [pull] = self.step(100.0).kv_orders.foreign
        assert isinstance(pull, ForeignPull)
        return pull

    def end(self) -> None:
        """End all requests. All blocks are free then."""
        self.scheduler.abort_all()
        self.step(200.0)
        assert self.scheduler.stats().num_free_blocks == NUM_BLOCKS


def filled(pull: ForeignPull, *are_filled: bool) -> ForeignPulled:
    return ForeignPulled(pull.pull_id, are_filled)


def test_a_request_waits_without_blocks_and_computes_the_last_tokens() -> None:
    world = World()
    pull = world.begin()
    assert (pull.kv, pull.received_s, pull.places) == (KV, 98.0, (0, 1, 2))
    assert world.step(100.1).is_empty
    world.step(100.2, filled(pull, True, True, True))
    plan = world.step(100.3)
    assert plan.num_scheduled_tokens == {"r": 2}
    assert plan.started[0].num_computed_tokens == 12
    assert plan.started[0].block_tables[0][:3] == pull.block_ids
    world.end()


def test_only_leading_blocks_are_of_use() -> None:
    world = World()
    pull = world.begin()
    world.step(100.2, filled(pull, True, False, True))
    plan = world.step(100.3)
    assert plan.num_scheduled_tokens == {"r": 10}
    assert not plan.kv_orders.foreign  # it is not tried again
    world.end()


def test_the_answer_says_where_the_kv_came_from() -> None:
    world = World()
    pull = world.begin(replace(REQUEST, sampling=SamplingParams(max_tokens=1)))
    world.step(100.2, filled(pull, True, True, True))
    plan = world.scheduler.schedule(100.3)
    [output] = world.scheduler.update(plan, RunResult({RequestId("r"): [50]}))
    assert output.served is not None
    assert output.served.loaded_tokens == {"vllm": 12}


@pytest.mark.parametrize(
    ("kv", "now"),
    [(KV, 124.0), (replace(KV, age_s=35.0), 100.1), (replace(KV, relayed_age_s=35.0), 100.1)],
    ids=["waited", "asked long ago by the router", "relayed late by a client"],
)
def test_kv_that_is_too_old_is_released_and_the_prompt_computed(kv: ForeignKv, now: float) -> None:
    world = World()
    world.scheduler.add(replace(REQUEST, foreign_kv=kv))
    plan = world.step(now)
    [release] = plan.kv_orders.foreign
    assert isinstance(release, ForeignRelease)
    assert (release.kv, now - release.received_s >= 25) == (kv, True)
    assert plan.num_scheduled_tokens == {"r": 14}
    world.end()


def test_a_short_prompt_is_computed_and_the_kv_released() -> None:
    world = World()
    world.scheduler.add(replace(REQUEST, prompt_token_ids=PROMPT[:4]))
    plan = world.step(100.0)
    assert plan.kv_orders.foreign == (ForeignRelease(KV, 98.0),)
    assert plan.num_scheduled_tokens == {"r": 4}


def test_kv_of_fewer_tokens_than_the_prompt_is_used() -> None:
    world = World()
    pull = world.begin(replace(REQUEST, foreign_kv=replace(KV, num_tokens=9)))
    assert pull.places == (0, 1)


def test_a_request_that_ends_before_its_pull_releases_the_kv() -> None:
    world = World()
    world.scheduler.add(REQUEST)
    world.scheduler.abort(REQUEST.request_id)
    assert world.step(100.0).kv_orders.foreign == (ForeignRelease(KV, 98.0),)
    assert not world.step(100.1).kv_orders.foreign
    world.end()


def test_a_request_that_ends_during_its_pull_keeps_the_blocks_until_the_pull_ends() -> None:
    world = World()
    pull = world.begin()
    world.scheduler.abort(REQUEST.request_id)
    assert not world.step(100.1).kv_orders.foreign  # the pull releases the KV
    assert world.scheduler.stats().num_free_blocks == NUM_BLOCKS - 3
    world.step(100.2, filled(pull, True, True, True))
    world.end()


def test_a_request_waits_for_a_limited_time() -> None:
    world = World()
    pull = world.begin()
    assert world.step(104.9).is_empty
    plan = world.step(105.1)
    assert plan.num_scheduled_tokens == {"r": 14}
    world.step(106.0, filled(pull, False, False, False))
    world.end()


def test_blocks_of_a_pull_are_not_cached_after_a_reset() -> None:
    world = World()
    pull = world.begin()
    world.scheduler.reset_prefix_cache()
    world.step(100.2, filled(pull, True, True, True))
    assert world.step(100.3).num_scheduled_tokens == {"r": 14}
    world.end()


def test_servers_that_are_not_listed_are_named() -> None:
    world = World()
    other = replace(REQUEST, foreign_kv=replace(KV, host="internal"))
    with pytest.raises(InvalidRequest, match=r"internal:5600.*--kv-sources"):
        world.scheduler.add(other)
    without = Scheduler(SchedulerConfig(), CacheConfig(NUM_BLOCKS, BLOCK_SIZE))
    with pytest.raises(InvalidRequest, match="--kv-sources"):
        without.add(REQUEST)
    assert not world.reader.asked


def test_adapters_are_refused() -> None:
    scheduler = World().scheduler
    scheduler.adapters.add("a")
    with pytest.raises(InvalidRequest, match="adapters"):
        scheduler.add(replace(REQUEST, adapter=AdapterRef("a", "a")))
