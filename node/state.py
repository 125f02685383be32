"""State of a node that it reports: its card, load, cached prefixes and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from baton.core.legs import LegKind
from baton.engine.engine_thread import EngineThread
from baton.engine.events import KvEvent
from baton.engine.kv_cache.block_names import PrefixEnds
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.external_kv import NO_HELD_CHANGES, HeldChanges
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node.adapters.registry import AdapterRegistry
from baton.node.engine_calls import EngineCalls, run_on_engine
from baton.node.legs import OfferedLegs
from baton.node.part import TakeKvEvents
from baton.rpc.adapters import NodeAdapters
from baton.rpc.cached_prefixes import CachedPrefixes, PrefixChanges, PrefixWatcher
from baton.rpc.errors import Draining
from baton.rpc.node_info import NodeCard, NodeLoad, NodeTotals, TierReport

# Minimum interval between updates. Changes within it are sent as one.
PACE_S = 0.01
# Of reports of all adapters, for each of them: writing and reading it takes about 10 us on each
# side, and each load, unload and eviction changes the report.
PACE_PER_ADAPTER_S = 0.000_25
TOTALS_PACE_S = 1.0  # of updates whose totals alone differ: they change with each step


@dataclass(frozen=True, slots=True)
class NodeUpdate:
    """Current load, and changes of the cached blocks since the last read."""

    load: NodeLoad
    kv_events: tuple[KvEvent, ...] = ()  # of the prefix cache
    host_changes: HeldChanges = NO_HELD_CHANGES  # of the host memory tier


class WatchUpdate(NamedTuple):
    """Changes for a watcher; None where nothing changed."""

    load: NodeLoad
    prefixes: PrefixChanges | None
    adapters: NodeAdapters | None = None


ReadUpdate = Callable[[], Awaitable[NodeUpdate]]


class NodeState:
    def __init__(
        self,
        card: NodeCard,
        calls: EngineCalls,
        read_update: ReadUpdate,
        subscribers: Sequence[TakeKvEvents] = (),
        adapters: AdapterRegistry | None = None,  # None: it serves none
    ) -> None:
        self.card = card
        self.calls = calls
        self.legs = OfferedLegs(card.legs, self._note_legs)
        self.adapters = adapters
        self._read_update = read_update
        self._subscribers = subscribers
        self._load = NodeLoad()
        self._prefixes = CachedPrefixes()
        self._published = asyncio.Event()
        self._drain_requested = asyncio.Event()
        self.is_paused = False
        self._num_calls = 0
        self._became_idle = asyncio.Event()
        self._became_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._drain_requested.is_set()

    def request_drain(self) -> None:
        """Refuse new calls from now on."""
        self._drain_requested.set()
        self.calls.changes.notify()

    def note_pause(self, *, is_paused: bool) -> None:
        """Refuse new legs from now on, or accept them again."""
        self.is_paused = is_paused
        self.calls.changes.notify()

    async def wait_for_drain_request(self) -> None:
        await self._drain_requested.wait()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Count a call until the block ends. A drain waits for it. Raises Draining."""
        if self.is_draining:
            raise Draining(f"node {self.card.node_id} is draining; use another node")
        self._num_calls += 1
        self._became_idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._became_idle.set()

    @contextmanager
    def serving_leg(self, kind: LegKind) -> Iterator[None]:
        """Count a leg until the block ends. Raises Draining, also if paused or not offered."""
        if self.is_paused:
            raise Draining(f"node {self.card.node_id} is paused; use another node, or resume it")
        with self.count_call(), self.legs.serving(kind):
            yield

    def _note_legs(self) -> None:
        self.card = replace(self.card, legs=self.legs.offered)
        self.calls.changes.notify()

    async def wait_until_idle(self) -> None:
        """Return when no call is in flight. Calls that wait for their last KV write count."""
        await self._became_idle.wait()

    async def wait_until_drained(self) -> None:
        """Return when no call is in flight, and none will be."""
        await self.wait_for_drain_request()
        await self.wait_until_idle()

    async def publish_updates(self) -> None:
        """Publish the node's load and prefixes at each change, with or without watchers."""
        while True:
            changed = self.calls.changes.next()
            update = await self._read_update()
            self._prefixes.take(update.kv_events, update.host_changes)
            for take_kv_events in self._subscribers:
                take_kv_events(update.kv_events)
            self._load = replace(
                update.load,
                is_draining=self.is_draining,
                is_paused=self.is_paused,
                legs=self.card.legs,
            )
            self._published.set()
            self._published = asyncio.Event()
            await asyncio.sleep(PACE_S)
            await changed.wait()

    async def watch_updates(self) -> AsyncGenerator[WatchUpdate, None]:
        """Yield the current load, prefixes and adapters, then each change."""
        last_load: NodeLoad | None = None
        prefixes = PrefixWatcher(self._prefixes)
        adapters = _AdapterWatcher(self.adapters, self.calls.changes.notify)
        totals, now = TotalsPace(), asyncio.get_running_loop().time
        published = self._published
        self.calls.changes.notify()
        await published.wait()  # the state that was published last can be old
        while True:
            published = self._published
            while True:
                update = WatchUpdate(self._load, prefixes.next(), adapters.next())
                is_due = totals.wait_s(update.load.totals, now()) == 0.0
                if update == (last_load, None, None) and not is_due:
                    break
                totals.note_sent(update.load.totals, now())
                yield update
                last_load = update.load
            await _wait(published, totals.wait_s(self._load.totals, now()))


class TotalsPace:
    """Times at which a watcher gets totals that nothing else is sent along with. Pure."""

    def __init__(self) -> None:
        self._sent = NodeTotals()
        self._next_s = float("-inf")

    def wait_s(self, totals: NodeTotals, now: float) -> float | None:
        """Return the time until these are to be sent; None: the watcher has them."""
        return None if totals == self._sent else max(0.0, self._next_s - now)

    def note_sent(self, totals: NodeTotals, now: float) -> None:
        self._sent, self._next_s = totals, now + TOTALS_PACE_S


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for the event, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


class _AdapterWatcher:
    """Reads of one watcher, the less often the more names there are."""

    def __init__(self, registry: AdapterRegistry | None, notify: Callable[[], None]) -> None:
        """`notify` has watchers read again."""
        self._registry = registry
        self._notify = notify
        self._version: int | None = None
        self._next_s = 0.0
        self._waiting: asyncio.TimerHandle | None = None

    def next(self) -> NodeAdapters | None:
        """Return the adapters, unless they are the same as before, or it is too early."""
        if self._registry is None or self._registry.version == self._version:
            return None
        loop = asyncio.get_running_loop()
        if loop.time() < self._next_s:
            self._waiting = self._waiting or loop.call_at(self._next_s, self._end_waiting)
            return None
        self._version = self._registry.version
        report = self._registry.report()
        self._next_s = loop.time() + PACE_PER_ADAPTER_S * len(report.names)
        return report

    def _end_waiting(self) -> None:
        self._waiting = None
        self._notify()


def update_reader(engine: EngineThread, scheduler: Scheduler, tiers: TieredKv | None) -> ReadUpdate:
    """Return a function that reads between engine steps.

    A read consumes the changes, so there must be a single reader.
    """
    host_ends = PrefixEnds(scheduler.cache_config.layout)
    return partial(run_on_engine, engine, partial(_read_update, scheduler, tiers, host_ends))


def _read_update(scheduler: Scheduler, tiers: TieredKv | None, host_ends: PrefixEnds) -> NodeUpdate:
    host_changes = NO_HELD_CHANGES
    if tiers is not None:
        changes = tiers.host.take_changes()
        # In this order: a state that loses a part and gains another one is never whole.
        removed = tuple(host_ends.remove(changes.removed))
        host_changes = HeldChanges(tuple(host_ends.add(changes.added)), removed)
    return NodeUpdate(_read_load(scheduler, tiers), scheduler.take_kv_events(), host_changes)


def _read_load(scheduler: Scheduler, tiers: TieredKv | None) -> NodeLoad:
    stats = scheduler.stats()
    num_waiting = stats.num_waiting + stats.num_ready + stats.num_waiting_for_remote_kvs
    num_waiting += stats.num_waiting_for_fsm
    totals = NodeTotals(
        num_prompt_tokens=stats.total_prefix_query_tokens,
        num_hit_tokens=stats.total_prefix_hit_tokens,
        num_sampled_tokens=stats.total_sampled_tokens,
        num_proposed_tokens=stats.total_proposed_tokens,
        num_accepted_tokens=stats.total_accepted_tokens,
        proposed_by_position=stats.proposed_by_position,
        accepted_by_position=stats.accepted_by_position,
        tiers=() if tiers is None else _tier_reports(tiers, stats.total_loaded_tokens),
        num_encoder_rows=stats.num_encoder_rows,
        max_encoder_rows=stats.max_encoder_rows,
    )
    return NodeLoad(stats.num_running, num_waiting, stats.num_free_blocks, totals=totals)


def _tier_reports(tiers: TieredKv, loaded_tokens: Mapping[str, int]) -> tuple[TierReport, ...]:
    return tuple(
        TierReport(
            name=tier.name,
            num_blocks=tier.num_blocks,
            num_bytes=tier.num_bytes,
            max_bytes=tier.max_bytes,
            num_loaded_tokens=loaded_tokens.get(tier.name, 0),
            num_loaded_blocks=tier.counters.num_loaded,
            num_stored_blocks=tier.counters.num_stored,
            num_evicted_blocks=tier.order.num_evicted,
            num_failed_blocks=tier.counters.num_failed,
        )
        for tier in tiers.status()
    )
