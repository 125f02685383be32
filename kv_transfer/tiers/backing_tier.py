"""A tier behind host memory: a store of blocks, and the thread that reads and writes it.

The copying thread of the tiers queues work here. A load goes before writes, and an error pauses the
tier, so that neither a full disk nor an unreachable store delays the engine.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from queue import Empty, PriorityQueue
from threading import Event, Lock, Thread
from typing import TypeVar

from baton.core.ids import BlockName
from baton.core.kv_hints import BlockHints
from baton.kv_transfer.external_kv import Load
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.tiers.copy_pace import CopyPace, PacedWork
from baton.kv_transfer.tiers.host_tier import (
    DroppedNames,
    HostBlock,
    HostTier,
    QueuedWrite,
    WriteQueue,
)
from baton.kv_transfer.tiers.kv_access import KvAccess, ReadTarget, copy_block
from baton.kv_transfer.tiers.stores.block_store import BlockStore, BlockUnusable, StoreKind
from baton.kv_transfer.tiers.tier_status import LoadTimes, Outage, TierCounters, TierStatus

logger = logging.getLogger(__name__)

STUCK_S = 0.5  # an operation that takes longer delays the estimates of others
LOAD_DEADLINE_S = 10.0  # from the order of a load: later blocks are not read any more

Job = Callable[[], None]
Item = TypeVar("Item")
Result = TypeVar("Result")
_LOAD, _CHANGE, _STOP = range(3)  # priorities of jobs


@dataclass(slots=True)
class TierParts:
    """Parts that all tiers of a node share."""

    kv: KvAccess
    host: HostTier
    pace: CopyPace
    clock: Callable[[], float]
    # The number of resets so far. The engine thread increments it, all threads compare it.
    generation: int = 0
    dropping: DroppedNames = field(default_factory=DroppedNames)  # each tier ends each drop


@dataclass(slots=True)
class PendingLoad:
    """A load on its way down the tiers. One thread at a time has it."""

    load: Load
    generation: int
    began_s: float
    fence: Fence  # after the passes that use its blocks
    sources: list[str | None]  # by block

    @property
    def missing(self) -> list[int]:
        return [place for place, source in enumerate(self.sources) if source is None]


class BackingTier:
    def __init__(self, kind: StoreKind, store: BlockStore, parts: TierParts) -> None:
        self.name = kind.name
        self.counters = TierCounters()
        self._times = LoadTimes(parts.kv.block_bytes / kind.bytes_per_s, kind.num_parallel)
        self._kind = kind
        self._store = store
        self._parts = parts
        self._host, self._pace, self._clock = parts.host, parts.pace, parts.clock
        self._cleared = parts.generation  # the generation that the store is in
        self._jobs: PriorityQueue[tuple[int, int, Job | None]] = PriorityQueue()
        self._numbers = count()
        self._writes = WriteQueue()
        self._num_reads = 0  # blocks to read
        self._reads_lock = Lock()
        # When the job began, or its last operation if that is later: a rest is not part of it.
        self._job_since_s: float | None = None
        self._reading = Outage(f"loaded from the {kind.name} tier", parts.clock)
        self._writing = Outage(f"stored in the {kind.name} tier", parts.clock)
        self._refresh_at_s = float("-inf")
        self._unfinished: deque[Job] = deque()  # changes that failed; repeated after a pause
        self.is_scanned = Event()
        self._pool = ThreadPoolExecutor(kind.num_parallel, f"kv-{kind.name}")
        self._thread = Thread(target=self._serve, name=f"kv-{kind.name}-tier", daemon=True)

    # --- any thread -----------------------------------------------------------------------

    def holds(self, name: BlockName) -> bool:
        is_current = self._cleared == self._parts.generation
        return is_current and self._reading.is_over and self._store.holds(name)

    def load_s(self, num_blocks: int) -> float:
        """Return an estimate of the seconds until so many blocks are read."""
        load_s = self._times.load_s(num_blocks + self._num_reads, self._clock())
        return load_s + (self._busy_s() if self.is_stuck else 0.0)

    @property
    def is_stuck(self) -> bool:
        return self._busy_s() > STUCK_S

    @property
    def delays_stores(self) -> bool:
        """True if the KV cache keeps blocks until they are written here."""
        return self._kind.max_waiting_share is None and not self.is_stuck

    def status(self) -> TierStatus:
        order, stored_bytes = self._store.order, self._store.stored_bytes
        is_usable = self._reading.is_over
        return TierStatus(self.name, order, stored_bytes, self.counters, is_usable)

    def _busy_s(self) -> float:
        since_s = self._job_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    # --- the copying thread ----------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread once everything is written."""
        self._put(_STOP, None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. Returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def write(self, name: BlockName, block: HostBlock, hints: BlockHints, generation: int) -> None:
        """Write a pinned block of host memory, and unpin it then."""
        share = self._kind.max_waiting_share
        most = inf if share is None else max(1, int(self._host.memory.num_blocks * share))
        is_full = self._jobs.qsize() >= most
        if is_full or self._writing.is_paused:
            self.counters.num_skipped_stores += 1
            self._host.unpin(block)
        else:
            self._writes.add(QueuedWrite(name, block, hints, generation, self._clock()))
            self._put(_CHANGE, partial(self._write_some, self._writes))

    def load(self, pending: PendingLoad, then: Job) -> None:
        """Read the missing blocks that are held here, then call `then`."""
        names = pending.load.names
        places = [place for place in pending.missing if self.holds(names[place])]
        if not places:
            then()
            return
        self._count_reads(len(places))
        self._put(_LOAD, partial(self._load, pending, places, then))
        self._pace.recheck_rests()

    def use(self, names: Sequence[BlockName], hints: BlockHints) -> None:
        self._put(_CHANGE, partial(self._use, names, hints))

    def drop(self, names: Sequence[BlockName]) -> None:
        self._put_change(partial(self._drop, names))

    def clear(self, generation: int, *, is_kept: bool = False) -> None:
        """Begin a generation, without blocks unless they are kept."""
        self._put_change(partial(self._clear, generation, is_kept))

    def _count_reads(self, num_blocks: int) -> None:
        with self._reads_lock:
            self._num_reads += num_blocks

    def _put_change(self, job: Job) -> None:
        # Those before the change are not written together with later ones.
        self._writes = WriteQueue()
        self._put(_CHANGE, partial(self._change, job))

    def _put(self, priority: int, job: Job | None) -> None:
        self._jobs.put((priority, next(self._numbers), job))

    # --- the thread of the tier ---------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            # In turns with jobs: a large store takes minutes, and jobs can be many.
            if not self.is_scanned.is_set():
                self._run(self._scan)
            pause_s = self._kind.refresh_s if self.is_scanned.is_set() else 0.0
            try:
                _, _, job = self._jobs.get(timeout=pause_s)
            except Empty:
                job = _do_nothing
            if job is None:
                self._pool.shutdown()
                self._run(self._close)
                return
            self._run(job)
            if self._clock() >= self._refresh_at_s:
                self._run(self._refresh)

    def _run(self, job: Job) -> None:
        self._job_since_s = self._clock()
        try:
            job()
        except Exception:
            logger.exception("the %s tier failed", self.name)
        finally:
            self._job_since_s = None

    def _scan(self) -> None:
        """Look for stored blocks, for a while. An error ends that, too."""
        is_found = True
        try:
            is_found = self._store.scan()
        except OSError as error:
            self._reading.note_error(error)
            self._unfinished.append(self._scan_again)
        finally:
            if is_found:
                self._refresh_at_s = self._clock() + self._kind.refresh_s  # all is known now
                self.is_scanned.set()

    def _scan_again(self) -> None:
        while not self._store.scan():
            pass

    def _refresh(self) -> None:
        """Learn what others stored. After a pause, this also tests the store."""
        self._refresh_at_s = self._clock() + self._kind.refresh_s
        if self._reading.is_paused:
            return
        try:
            self._repeat_unfinished()
            self._store.refresh()
        except OSError as error:
            self._reading.note_error(error)
            return
        self._reading.note_success()

    def _close(self) -> None:
        with suppress(OSError):  # what is not removed now is found again after a restart
            self._repeat_unfinished()
        self._store.close()

    def _repeat_unfinished(self) -> None:
        while self._unfinished:
            job = self._unfinished.popleft()
            try:
                job()
            except OSError:
                self._unfinished.appendleft(job)
                raise

    def _map(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return self._pool.map(call, items) if self._kind.num_parallel > 1 else map(call, items)

    def _write_some(self, waiting: WriteQueue) -> None:
        """Write the next blocks. There is a job for each block; later ones find nothing to do."""
        writes = waiting.take(self._kind.num_parallel)
        are_written = list(self._map(self._write, writes))
        self.counters.num_stored += sum(are_written)
        self.counters.num_failed_stores += len(writes) - sum(are_written)

    def _write(self, write: QueuedWrite) -> bool:
        try:
            is_stale = write.generation != self._parts.generation
            if is_stale or self._writing.is_paused:
                return False
            block = write.block
            source = (self._host.memory, block.slot, block.digest)
            with self._turn(PacedWork.WRITE_BEHIND, write.ordered_s):
                self._store.write(write.name, *source, write.hints)
            self._writing.note_success()
            return True
        except BlockUnusable:
            return False
        except OSError as error:
            self._writing.note_error(error)
            return False
        except Exception:  # the others that are written at the time must end, too
            logger.exception("the %s tier failed to write a block", self.name)
            return False
        finally:
            self._host.unpin(write.block)

    @contextmanager
    def _turn(self, work: PacedWork, ordered_s: float) -> Iterator[None]:
        """Wait for a turn, as long as no load waits for it. The tier is not stuck meanwhile."""
        self._job_since_s = self._clock() + max(0.0, self._pace.rest_s(work, ordered_s))
        is_write = work is PacedWork.WRITE_BEHIND
        with self._pace.turn(work, ordered_s, lambda: is_write and self._num_reads > 0):
            yield

    def _load(self, pending: PendingLoad, places: Sequence[int], then: Job) -> None:
        began_s = self._clock()
        try:
            results = list(self._map(partial(self._load_block, pending), places))
            reads_s = [read_s for read_s in results if read_s is not None]
            for place, read_s in zip(places, results, strict=True):
                if read_s is not None:
                    pending.sources[place] = self.name
            if reads_s:
                self._times.learn(sum(reads_s), len(reads_s), self._clock())
            self.counters.note_load(self._clock() - began_s, len(reads_s))
            self.counters.num_failed_loads += len(places) - len(reads_s)
        finally:
            self._count_reads(-len(places))
            then()

    def _load_block(self, pending: PendingLoad, place: int) -> float | None:
        """Read a block, and return the time that it took; None if it was not loaded.

        Nothing else writes to its place in the KV memory meanwhile.
        """
        name, block_id = pending.load.names[place], pending.load.block_ids[place]
        is_late = self._clock() - pending.began_s > LOAD_DEADLINE_S
        if is_late or not self._reading.is_over or not self._may_load(pending, name):
            return None
        try:
            kv = self._parts.kv
            with self._turn(PacedWork.LOAD, pending.began_s), kv.reading(block_id) as target:
                began_s = self._clock()
                digest = self._store.read(name, *target)
                if digest is None or not self._may_load(pending, name):  # dropped meanwhile
                    return None
                kv.fill(block_id, target)
                self._promote(pending, name, target, digest)
                return self._clock() - began_s
        except BlockUnusable as error:
            logger.warning("a block of the %s tier is skipped: %s", self.name, error)
            return None
        except OSError as error:
            self._reading.note_error(error)
            return None
        except Exception:  # the others of the load must end, too
            logger.exception("the %s tier failed to read a block", self.name)
            return None

    def _may_load(self, pending: PendingLoad, name: BlockName) -> bool:
        return pending.generation == self._parts.generation and name not in self._parts.dropping

    def _promote(
        self, pending: PendingLoad, name: BlockName, target: ReadTarget, digest: bytes
    ) -> None:
        """Keep a block that was read in host memory as well."""
        hints = self._store.hints_of(name)
        block = None if self._host.holds(name) else self._host.reserve(hints.tenant)
        if block is None:
            return
        copy_block(*target, self._host.memory, block.slot)
        self._host.publish(name, block, digest, hints)
        self._host.unpin(block)
        if not self._may_load(pending, name):  # dropped meanwhile, also from host memory
            self._host.remove(name)

    def _use(self, names: Sequence[BlockName], hints: BlockHints) -> None:
        with suppress(OSError):  # the order of eviction is then less exact
            self._store.use(names, hints)

    def _change(self, job: Job) -> None:
        """Make a change after those before it. If it fails, repeat it until it succeeds."""
        if self._unfinished:
            self._unfinished.append(job)
            return
        try:
            job()
        except OSError as error:
            self._unfinished.append(job)
            self._reading.note_error(error)

    def _drop(self, names: Sequence[BlockName]) -> None:
        self._store.refresh()  # finds the tenants of the others' blocks
        for name in names:
            self._store.remove(name)
        self._parts.dropping.end(names)

    def _clear(self, generation: int, is_kept: bool) -> None:
        if not is_kept:
            self._store.clear()
        self._cleared = generation


def _do_nothing() -> None:
    pass
