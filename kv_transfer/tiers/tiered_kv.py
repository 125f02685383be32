"""External KV cache of a node: host memory, and behind it stores such as files.

One thread copies between KV memory and host memory; each tier behind it has a thread of its own. A
stored block is copied to host memory, where the engine no longer waits for it, and written from
there to the tiers behind it. A load takes each block from the first tier that has it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from baton.core.ids import BlockName
from baton.kv_transfer.external_kv import HOST, ExternalOrders, ExternalReports, Loaded
from baton.kv_transfer.fence import PASSED
from baton.kv_transfer.tiers.backing_tier import BackingTier, Job, PendingLoad, TierParts
from baton.kv_transfer.tiers.copy_pace import CopyPace, PacedWork
from baton.kv_transfer.tiers.host_growth import FirstTouch
from baton.kv_transfer.tiers.host_stores import HostStores, Storing
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import KvAccess
from baton.kv_transfer.tiers.stores.block_store import BlockStore, StoreKind
from baton.kv_transfer.tiers.tier_status import LoadTimes, TierCounters, TierStatus

logger = logging.getLogger(__name__)

ROOM_RETRY_S = 0.1  # for which a store waits for room before it looks whether a tier is stuck
SCAN_S = 5.0  # for which a node waits for stored blocks to be found when it starts
FLUSH_S = 10.0  # for blocks still to be written when a node ends
HOST_BYTES_PER_S = 5e9  # first guess of the speed of loads


class TieredKv:
    """Implements ExternalKv. Use it as a context manager: it ends its threads."""

    def __init__(
        self,
        kv: KvAccess,
        host: HostTier,
        stores: Iterable[tuple[StoreKind, BlockStore]] = (),
        clock: Callable[[], float] = time.monotonic,
        pace: CopyPace | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """The fastest store is the first. `wake` is called on any thread when there is a report."""
        self.host = host
        self.host.on_room = lambda: self._copies.put(lambda: None)  # stores are continued then
        self._clock = clock
        self._wake = wake
        self.pace = pace or CopyPace(clock)
        self._host_counters = TierCounters()
        self._host_times = LoadTimes(kv.block_bytes / HOST_BYTES_PER_S)
        self._parts = TierParts(kv, host, self.pace, clock)
        self._cleared = 0  # the generation that host memory is in
        self._backing = [BackingTier(kind, store, self._parts) for kind, store in stores]
        self._copies: SimpleQueue[Job | None] = SimpleQueue()
        self._stores = HostStores(
            self._parts,
            self._backing,
            self._host_counters,
            must_yield=lambda: not self._copies.empty(),
            is_urgent=lambda: bool(self._loads),
            on_end=wake,
        )
        self._loads: deque[PendingLoad] = deque()  # not begun yet
        self._loaded: deque[Loaded] = deque()  # ended since the last poll
        self._thread = Thread(target=self._copy_blocks, name="kv-host-tier", daemon=True)
        self._first_touch = FirstTouch(host.memory, self.pace, clock)
        self.host.on_grown = self._first_touch.allow

    def __enter__(self) -> TieredKv:
        self._thread.start()
        self._first_touch.__enter__()
        for tier in self._backing:
            tier.start()
        ends_s = time.monotonic() + SCAN_S
        for tier in self._backing:
            tier.is_scanned.wait(max(0.0, ends_s - time.monotonic()))
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is not written yet, for `FLUSH_S` at most."""
        self._first_touch.__exit__()
        self.pace.set_decoding(False)
        self._copies.put(None)
        ends_s = time.monotonic() + FLUSH_S
        self._thread.join(FLUSH_S)
        has_ended = not self._thread.is_alive()
        for tier in self._backing:
            if not tier.join(max(0.0, ends_s - time.monotonic())):
                logger.warning("the last KV blocks were not stored in the %s tier", tier.name)
                has_ended = False
        if has_ended:
            self._parts.kv.close()

    def status(self) -> tuple[TierStatus, ...]:
        """Return what each tier holds and has done, from the fastest on. Any thread may call it."""
        block_bytes = self._parts.kv.block_bytes
        host = TierStatus(HOST, self.host.order, block_bytes, self._host_counters)
        return (host, *(tier.status() for tier in self._backing))

    # --- ExternalKv: the engine thread ------------------------------------------------------

    def holds(self, name: BlockName) -> bool:
        if name in self._parts.dropping:
            return False
        return self._is_in_host(name) or any(tier.holds(name) for tier in self._backing)

    def load_s(self, names: Sequence[BlockName]) -> float:
        num_host = sum(map(self._is_in_host, names))
        load_s = self._host_times.load_s(num_host, self._clock())
        rest = [name for name in names if not self._is_in_host(name)]
        for tier in self._backing:
            num_held = sum(map(tier.holds, rest))
            load_s += tier.load_s(num_held) if num_held else 0.0
            rest = [name for name in rest if not tier.holds(name)]
        return load_s

    def start(self, orders: ExternalOrders) -> None:
        generation = self._parts.generation
        has_copies = bool(orders.stores or orders.loads)
        fence = self._parts.kv.record() if has_copies else PASSED
        for store in orders.stores:
            storing = Storing(store, generation, self._clock(), fence, len(store.names))
            self._copies.put(partial(self._stores.add, storing))
        for load in orders.loads:
            sources: list[str | None] = [None] * len(load.names)
            self._loads.append(PendingLoad(load, generation, self._clock(), fence, sources))
            self._copies.put(self._load_next)
            self.pace.recheck_rests()
        if orders.drops:
            for _ in (HOST, *self._backing):
                self._parts.dropping.begin(orders.drops)
            self._copies.put(partial(self._drop, orders.drops))
        for use in orders.uses:
            self._copies.put(partial(self._stores.use, use, generation))

    def poll(self) -> ExternalReports:
        loaded = [self._loaded.popleft() for _ in range(len(self._loaded))]
        stored = self._stores.take_ended()
        return ExternalReports(tuple(loaded), tuple(stored))

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        num_blocks = {
            tier.name: tier.num_blocks
            for tier in self.status()
            if tiers is None or tier.name in tiers
        }
        if num_blocks:
            self._parts.generation += 1
            self._copies.put(partial(self._clear, num_blocks.keys(), self._parts.generation))
        return num_blocks

    def _is_in_host(self, name: BlockName) -> bool:
        return self._cleared == self._parts.generation and self.host.holds(name)

    # --- the copying thread -------------------------------------------------------------------

    def _copy_blocks(self) -> None:
        is_ending = False
        while not is_ending:
            try:
                job = self._copies.get(timeout=ROOM_RETRY_S if self._stores.is_waiting else None)
                is_ending = job is None
                if job is not None:
                    job()
            except Empty:
                pass
            except Exception:
                logger.exception("the host tier failed")
            self._stores.copy(must_end=is_ending)
        for tier in self._backing:
            tier.stop()

    def _load_next(self) -> None:
        pending = self._loads.popleft()
        tiers: Sequence[BackingTier] = ()
        try:
            pending.fence.wait()
            tiers = self._backing
            began_s = self._clock()
            num_copied = self._copy_from_host(pending)
            self._host_counters.note_load(self._clock() - began_s, num_copied)
        finally:
            self._load_behind(pending, tiers)

    def _load_behind(self, pending: PendingLoad, tiers: Sequence[BackingTier]) -> None:
        """Load what is missing from the tiers behind, one after the other, and end the load."""
        if tiers and None in pending.sources:
            tiers[0].load(pending, partial(self._load_behind, pending, tiers[1:]))
            return
        self._loaded.append(Loaded(pending.load.load_id, tuple(pending.sources)))
        self._wake()

    def _copy_from_host(self, pending: PendingLoad) -> int:
        """Copy what is in host memory. Returns the number of blocks."""
        load, kv, host = pending.load, self._parts.kv, self.host
        pinned = dict(enumerate(self.host.pin_all(load.names)))
        found = {place: block for place, block in pinned.items() if block is not None}
        try:
            digests, copy_s = self.pace.copy_blocks(
                lambda slots, block_ids: kv.load(host.memory, slots, block_ids),
                kv.block_bytes,
                blocks=[block.slot for block in found.values()],
                into=[load.block_ids[place] for place in found],
                work=PacedWork.LOAD,
                ordered_s=pending.began_s,
            )
            if found:
                self._host_times.learn(copy_s, len(found), self._clock())
            for (place, block), digest in zip(found.items(), digests, strict=True):
                if digest == block.digest:
                    pending.sources[place] = HOST
                else:
                    self._host_counters.num_failed_loads += 1
                    self.host.remove(load.names[place])
        finally:
            self.host.unpin_all(found.values())
        return len(load.names) - len(pending.missing)

    def _drop(self, names: Sequence[BlockName]) -> None:
        self._stores.drop(frozenset(names))
        for name in names:
            self.host.remove(name)
        self._wake()
        self._parts.dropping.end(names)
        for tier in self._backing:
            tier.drop(names)

    def _clear(self, tiers: Collection[str], generation: int) -> None:
        if HOST in tiers:
            self.host.clear()
            self._wake()
        self._cleared = generation
        for tier in self._backing:
            tier.clear(generation, is_kept=tier.name not in tiers)
