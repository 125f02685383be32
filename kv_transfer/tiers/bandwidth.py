"""Measured bandwidth of tiers, by the code that nodes use."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Event

from baton.core.ids import BlockId
from baton.kv_transfer.external_kv import HOST, ExternalOrders, Load, LoadId, Store, StoreId
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import BlockMemory, CopyBlocks, CpuKvAccess, copy_block
from baton.kv_transfer.tiers.stores.block_store import BlockStore
from baton.kv_transfer.tiers.tiered_kv import TieredKv

Clock = Callable[[], float]
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class HostRound:
    """One round of copies of the same blocks."""

    num_bytes: int
    memcpy_s: float  # block by block, without digests
    store_s: float  # from the order to its report
    load_s: float


@dataclass(frozen=True, slots=True)
class StoreRates:
    write_bytes_per_s: float
    read_bytes_per_s: float


class TierDriver:
    """The engine's side of tiers: orders stores and loads, and waits for their ends."""

    def __init__(self, tiers: TieredKv, woken: Event) -> None:
        self._tiers = tiers
        self._woken = woken  # by the tiers
        self._numbers = count()

    def store(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        store = Store(StoreId(next(self._numbers)), tuple(names), tuple(map(BlockId, block_ids)))
        self._tiers.start(ExternalOrders(stores=(store,)))
        self._wait()

    def load(self, names: Sequence[bytes], block_ids: Sequence[int]) -> tuple[str | None, ...]:
        load = Load(LoadId(next(self._numbers)), tuple(names), tuple(map(BlockId, block_ids)))
        self._tiers.start(ExternalOrders(loads=(load,)))
        return self._wait()

    def _wait(self) -> tuple[str | None, ...]:
        """Wait for the only order in progress. Returns the sources of a load."""
        while self._woken.wait(WAIT_S):
            self._woken.clear()
            reports = self._tiers.poll()
            if reports.loaded:
                return reports.loaded[0].sources
            if reports.stored:
                return ()
        raise TimeoutError(f"the tiers did not answer within {WAIT_S:.0f} s")


def measure_host(
    kv: BlockMemory, host: BlockMemory, copy: CopyBlocks, clock: Clock, seed: int = 0
) -> HostRound:
    """Store blocks of random places in host memory and load them; copy them by memcpy as well."""
    names = _names(kv.num_blocks)
    block_ids = random.Random(seed).sample(range(kv.num_blocks), kv.num_blocks)
    woken = Event()
    with TieredKv(CpuKvAccess(kv, copy), HostTier(host), wake=woken.set) as tiers:
        driver = TierDriver(tiers, woken)
        began_s = clock()
        driver.store(names, block_ids)
        stored_s = clock()
        for slot, block_id in enumerate(block_ids):
            copy_block(host, slot, kv, block_id)
        copied_s = clock()
        sources = driver.load(names, block_ids)
        loaded_s = clock()
    if set(sources) != {HOST}:
        raise RuntimeError("host memory did not give what was stored in it")
    num_bytes = kv.num_blocks * kv.block_bytes
    return HostRound(num_bytes, copied_s - stored_s, stored_s - began_s, loaded_s - copied_s)


def measure_store(
    store: BlockStore,
    memory: BlockMemory,
    num_parallel: int,
    clock: Clock,
    between: Callable[[], None] = lambda: None,
) -> StoreRates:
    """Write the blocks of the memory, call `between`, read them, and remove them.

    Raises OSError, also for a block that is not read as it was written.
    """
    names = _names(memory.num_blocks)
    digests = [memory.digest(block) for block in range(memory.num_blocks)]
    num_bytes = memory.num_blocks * memory.block_bytes
    with ThreadPoolExecutor(num_parallel) as pool:
        blocks = range(memory.num_blocks)
        began_s = clock()
        list(
            pool.map(lambda block: store.write(names[block], memory, block, digests[block]), blocks)
        )
        written_s = clock()
        between()
        reading_s = clock()
        found = list(pool.map(lambda block: store.read(names[block], memory, block), blocks))
        read_s = clock()
    for name in names:
        store.remove(name)
    if found != digests:
        raise OSError("blocks were not read as they were written")
    return StoreRates(num_bytes / (written_s - began_s), num_bytes / (read_s - reading_s))


def _names(num_blocks: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(num_blocks)]
