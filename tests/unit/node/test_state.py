"""Node state as sent to watchers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.core.ids import AdapterRef, BlockId
from baton.core.legs import LegKind
from baton.engine.engine_thread import EngineThread
from baton.engine.events import BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.kv_transfer.external_kv import ExternalOrders, HeldChanges, Store, StoreId
from baton.kv_transfer.tiers.kv_access import CpuKvAccess
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node import state as node_state
from baton.node.adapters.registry import AdapterRegistry
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.part import TakeKvEvents
from baton.node.state import (
    NodeState,
    NodeUpdate,
    TotalsPace,
    WatchUpdate,
    update_reader,
)
from baton.rpc.adapters import NameOrder, NodeAdapters
from baton.rpc.cached_prefixes import PrefixChanges, unpack_names
from baton.rpc.node_info import NodeLoad, NodeTotals
from tests.support.engines import an_engine
from tests.support.node_calls import a_card
from tests.support.tier_memory import OwnedMemory, host_tier, name_of

PATIENCE_S = 30
ONE, TWO = BlockHash(b"1" * 16), BlockHash(b"2" * 16)


@dataclass(slots=True)
class FakeNews:
    """Fake source of engine updates; each event is returned once."""

    num_running: int = 0
    events: list[KvEvent] = field(default_factory=list)
    num_reads: int = 0
    totals: NodeTotals = NodeTotals()

    async def read(self) -> NodeUpdate:
        events, self.events = tuple(self.events), []
        self.num_reads += 1
        return NodeUpdate(NodeLoad(self.num_running, totals=self.totals), events)

    def store(self, *names: BlockHash) -> None:
        self.events.append(BlockStored(names, None, (), 16))


@asynccontextmanager
async def followed(
    news: FakeNews,
    take_kv_events: TakeKvEvents = lambda _: None,
    adapters: AdapterRegistry | None = None,
) -> AsyncIterator[NodeState]:
    calls = EngineCalls(EngineThread(an_engine()), NodeChanges())
    state = NodeState(a_card(LegKind.DECODE), calls, news.read, (take_kv_events,), adapters)
    following = asyncio.ensure_future(state.publish_updates())
    try:
        yield state
    finally:
        following.cancel()


def a_load(num_running: int = 0) -> NodeLoad:
    return NodeLoad(num_running, legs=(LegKind.DECODE,))


def test_a_late_watcher_receives_earlier_events_as_a_snapshot() -> None:
    async def late() -> WatchUpdate:
        news = FakeNews(num_running=2)
        async with followed(news) as state:
            for name in (ONE, TWO):
                news.store(name)
                state.calls.changes.notify()
                while news.events:
                    await asyncio.sleep(0)
            async with aclosing(state.watch_updates()) as reported:
                return await anext(reported)

    load, changes, _ = asyncio.run(asyncio.wait_for(late(), PATIENCE_S))

    assert load == a_load(2)
    assert changes is not None
    assert changes.is_snapshot
    assert unpack_names(changes.stored) == {ONE, TWO}


def test_a_watcher_receives_single_changes_and_batches_of_simultaneous_ones() -> None:
    async def watched() -> list[WatchUpdate]:
        news = FakeNews()
        async with followed(news) as state, aclosing(state.watch_updates()) as reported:
            first = await anext(reported)
            for name in (ONE, TWO):  # the rate limit delays the second read
                news.store(name)
                state.calls.changes.notify()
            second = await anext(reported)
            news.num_running = 1
            state.calls.changes.notify()
            return [first, second, await anext(reported)]

    first, second, third = asyncio.run(asyncio.wait_for(watched(), PATIENCE_S))

    assert first == WatchUpdate(a_load(), PrefixChanges(1, True, b""))
    load, changes, _ = second
    assert load == a_load()
    assert changes is not None
    assert not changes.is_snapshot
    assert unpack_names(changes.stored) == {ONE, TWO}
    assert third == WatchUpdate(a_load(1), None)


def test_totals_that_alone_differ_are_sent_at_most_once_a_second() -> None:
    pace, older, newer = TotalsPace(), NodeTotals(1), NodeTotals(2)

    assert pace.wait_s(NodeTotals(), 5.0) is None
    assert pace.wait_s(older, 5.0) == 0.0
    pace.note_sent(older, 5.0)
    assert pace.wait_s(older, 9.0) is None
    assert pace.wait_s(newer, 5.25) == 0.75
    assert pace.wait_s(newer, 7.0) == 0.0


def test_a_watcher_receives_totals_of_a_request_that_nothing_else_showed() -> None:
    async def watched() -> int:
        news = FakeNews()
        async with followed(news) as state, aclosing(state.watch_updates()) as reported:
            await anext(reported)
            news.totals = NodeTotals(num_prompt_tokens=7)
            state.calls.changes.notify()
            return (await anext(reported)).load.totals.num_prompt_tokens

    assert asyncio.run(asyncio.wait_for(watched(), PATIENCE_S)) == 7


def test_a_late_watcher_receives_the_current_totals_first() -> None:
    async def late() -> int:
        news = FakeNews()
        async with followed(news) as state:
            for count in (7, 8):
                news.totals = NodeTotals(num_prompt_tokens=count)
                async with aclosing(state.watch_updates()) as reported:
                    update = await anext(reported)
            return update.load.totals.num_prompt_tokens

    assert asyncio.run(asyncio.wait_for(late(), PATIENCE_S)) == 8


def test_kv_events_are_forwarded() -> None:
    async def passed_on() -> list[KvEvent]:
        news, taken = FakeNews(), list[KvEvent]()
        async with followed(news, taken.extend) as state, aclosing(state.watch_updates()) as seen:
            news.store(ONE, TWO)
            await anext(seen)
            return taken

    events = asyncio.run(asyncio.wait_for(passed_on(), PATIENCE_S))

    assert events == [BlockStored((ONE, TWO), None, (), 16)]


def test_a_drain_is_reported_at_once() -> None:
    async def drained() -> NodeLoad:
        async with followed(FakeNews()) as state, aclosing(state.watch_updates()) as reported:
            await anext(reported)
            state.request_drain()
            return (await anext(reported)).load

    assert asyncio.run(asyncio.wait_for(drained(), PATIENCE_S)).is_draining


def test_an_update_names_host_memory_blocks_of_the_first_group_only() -> None:
    async def read() -> NodeUpdate:
        core, stored = an_engine(), threading.Event()
        made = TieredKv(CpuKvAccess(OwnedMemory(4).blocks), host_tier(4), wake=stored.set)
        with EngineThread(core) as engine, made as tiers:
            names = (name_of(1), name_of(1, group=1), name_of(2))
            store = Store(StoreId(1), names, (BlockId(0), BlockId(1), BlockId(2)))
            tiers.start(ExternalOrders(stores=(store,)))
            assert await asyncio.to_thread(stored.wait, PATIENCE_S)
            return await update_reader(engine, core.scheduler, tiers)()

    update = asyncio.run(asyncio.wait_for(read(), PATIENCE_S))

    assert update.host_changes == HeldChanges(added=(name_of(1), name_of(2)))


class FakeRegistry:
    """Registry of one adapter, which is named as its version."""

    version = 0

    def report(self) -> NodeAdapters:
        name = f"version {self.version}"
        return NodeAdapters((NameOrder(name, 1, AdapterRef(name, name)),))


def test_reports_of_many_adapters_are_paced_and_other_updates_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        registry: Any = FakeRegistry()
        news = FakeNews()
        async with followed(news, adapters=registry) as state:
            async with aclosing(state.watch_updates()) as updates:
                assert (await anext(updates)).adapters == registry.report()
                for count in (1, 2):
                    registry.version += 1
                    news.num_running = count
                    state.calls.changes.notify()
                    assert await anext(updates) == WatchUpdate(a_load(count), None, None)

            monkeypatch.setattr(node_state, "PACE_PER_ADAPTER_S", 0.02)
            async with aclosing(state.watch_updates()) as updates:
                assert (await anext(updates)).adapters == registry.report()
                registry.version += 1
                state.calls.changes.notify()
                # The end of the pause is enough for the report.
                assert (await anext(updates)).adapters == registry.report()

    monkeypatch.setattr(node_state, "PACE_PER_ADAPTER_S", 3600.0)
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
