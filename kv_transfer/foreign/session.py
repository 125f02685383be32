"""Session with one engine of a vLLM server: its blocks are read one run after the other.

Owned by the reader's thread. PeerUnreachable means that the session must be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import mmap

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.foreign.metadata import ForeignBlocks
from baton.kv_transfer.foreign.nixl_reads import NixlReads
from baton.kv_transfer.foreign.runs import Bay, RunRead, min_run_blocks, remote_blocks
from baton.kv_transfer.foreign.types import ForeignPull
from baton.kv_transfer.layout import LayoutRun
from baton.kv_transfer.transports.base import UcxConfig

NUM_BAYS = 2  # parts of the staging memory: one is read into while the other is converted
BAY_BYTES = 16 << 20
LINGER_S = 0.1  # for which UCX is driven often after a notification
FLUSH_S = 5.0  # and then now and then: nothing confirms that it has left


@dataclass(frozen=True, slots=True)
class _Read:
    pull: ForeignPull
    run: LayoutRun
    bay: Bay
    handle: int


class ForeignSession:
    def __init__(
        self,
        blocks: ForeignBlocks,
        block_size: int,  # of this node
        ucx: UcxConfig,
        allocate: Callable[[int], mmap],
        release: Callable[[mmap], None],
    ) -> None:
        """The session owns the memory that it allocates, and releases it once nothing uses it."""
        self.blocks = blocks
        layout = blocks.layout
        num_needed = min_run_blocks(block_size, layout.block_size)
        self.max_run_blocks = max(num_needed, BAY_BYTES // layout.block_bytes)
        bay_bytes = self.max_run_blocks * layout.block_bytes
        self._memory = allocate(NUM_BAYS * bay_bytes)
        with ExitStack() as staging:
            staging.callback(release, self._memory)
            self._reads = NixlReads(blocks, self._memory, ucx)
            self._staging = staging.pop_all()
        self._free_bays = [Bay(self._memory, index * bay_bytes) for index in range(NUM_BAYS)]
        self._reading: _Read | None = None
        self._is_closed = False
        self._beat_s = float("-inf")
        self._notified_s = float("-inf")

    @property
    def reading(self) -> ForeignPull | None:
        """Pull of which a run is being read."""
        return None if self._reading is None else self._reading.pull

    @property
    def can_begin(self) -> bool:
        return self._reading is None and bool(self._free_bays)

    def is_busy(self, now: float) -> bool:
        """Return whether UCX must be driven often."""
        return self._reading is not None or now < self._notified_s + LINGER_S

    def is_flushing(self, now: float) -> bool:
        return now < self._notified_s + FLUSH_S

    def serves(self, kv: ForeignKv) -> bool:
        return kv.engine_id == self.blocks.engine_id

    def begin(self, pull: ForeignPull, run: LayoutRun) -> None:
        """Begin to read a run. Call it only while `can_begin`."""
        bay = self._free_bays[-1]
        handle = self._reads.read(remote_blocks(pull, run), bay.offset)
        self._reading = _Read(pull, run, self._free_bays.pop(), handle)

    def take_read(self) -> RunRead | None:
        """Drive UCX, and return the run that has been read."""
        self._reads.progress()
        read = self._reading
        if read is None or not self._reads.is_read(read.handle):
            return None
        self._reading = None
        return RunRead(read.pull, read.run, self.blocks, read.bay, self.give_back)

    def give_back(self, bay: Bay) -> None:
        """Return a bay, which nothing reads any more."""
        self._free_bays.append(bay)
        self._release_unused()

    def release(self, kv: ForeignKv, now: float) -> None:
        """Let the server release blocks: the only reader has what it needs."""
        self._notify(f"{kv.request_id}:1", now)

    def beat(self, held: Iterable[ForeignKv], every_s: float, now: float) -> None:
        """Send a heartbeat for these requests if it is due."""
        names = [kv.request_id for kv in held if self.serves(kv)]
        if names and now >= self._beat_s + every_s:
            self._beat_s = now
            self._notify("HB:" + ",".join(names), now)

    def beat_soon(self) -> None:
        """Let the server learn at once of a request that it holds blocks for."""
        self._beat_s = float("-inf")

    def close(self) -> None:
        """Destroy the agent. The staging memory is released with the return of the last bay."""
        self._reads.close()
        self._is_closed = True
        if self._reading is not None:  # nothing is read into its bay any more
            self._free_bays.append(self._reading.bay)
            self._reading = None
        self._release_unused()

    def _release_unused(self) -> None:
        if self._is_closed and len(self._free_bays) == NUM_BAYS:
            self._staging.close()

    def _notify(self, text: str, now: float) -> None:
        self._reads.notify(text)
        self._notified_s = now
