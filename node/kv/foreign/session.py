"""Session with one engine of a vLLM server: its blocks are read one run after the other.

Owned by the reader's thread. PeerUnreachable means that the session must be closed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.foreign_kv import ForeignPull
from baton.kv_transfer.layout import KvLayout, LayoutRun, StagedRun
from baton.kv_transfer.transports.base import UcxConfig
from baton.kv_transfer.transports.nixl import (
    agent_config,
    backend_parameters,
    import_nixl,
    nixl_errors,
)
from baton.node.kv.foreign.metadata import ForeignBlocks

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


class NixlReads:
    """NIXL agent for one server. Raises PeerUnreachable whenever the server cannot be read."""

    def __init__(self, blocks: ForeignBlocks, memory: mmap, config: UcxConfig) -> None:
        self._nixl = nixl = import_nixl()
        self._errors = nixl_errors(nixl)
        self._blocks = blocks
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory  # must outlive the agent
        self._handles: set[int] = set()
        self._agent: Any = None
        self._registered: Any = None
        self._peer = ""
        try:
            self._agent = nixl.nixlAgent(os.urandom(12).hex(), agent_config(nixl))
            self._agent.createBackend("UCX", backend_parameters(config))
            region = [(self._address, len(memory), 0, "")]
            self._registered = nixl.nixlRegDList(nixl.DRAM_SEG, region)
            self._agent.registerMem(self._registered, [])
            name = self._agent.loadRemoteMD(blocks.agent_metadata)
            self._peer = name.decode(errors="replace") if isinstance(name, bytes) else name
        except self._errors as error:
            self.close()
            raise PeerUnreachable(f"NIXL does not accept its metadata: {error!r}") from error

    def read(self, block_ids: Sequence[int], offset: int) -> int:
        """Begin to read all layers of these blocks, block by block, to `offset` in the memory."""
        kind = self._nixl.DRAM_SEG if self._blocks.is_on_cpu else self._nixl.VRAM_SEG
        with self._failing("it cannot be read"):
            handle = int(
                self._agent.createXferReq(
                    self._nixl.NIXL_READ,
                    self._nixl.nixlXferDList(self._nixl.DRAM_SEG, self._local(block_ids, offset)),
                    self._nixl.nixlXferDList(kind, self._remote(block_ids)),
                    self._peer,
                    b"",
                )
            )
            self._handles.add(handle)
            self._agent.postXferReq(handle, b"")
        return handle

    def is_read(self, handle: int) -> bool:
        """Return whether a read has ended."""
        with self._failing("a read has failed"):
            status = self._agent.getXferStatus(handle)
            if status == self._nixl.NIXL_IN_PROG:
                return False
            if status != self._nixl.NIXL_SUCCESS:
                raise PeerUnreachable(f"a read has failed: {status}")
            self._handles.remove(handle)
            self._agent.releaseXferReq(handle)
        return True

    def notify(self, text: str) -> None:
        with self._failing("it cannot be notified"):
            self._agent.genNotif(self._peer, text.encode())

    def progress(self) -> None:
        """Drive UCX, which sends notifications. Those of the server have no meaning here."""
        with self._failing("the connection is broken"):
            self._agent.getNotifs({}, [])

    def close(self) -> None:
        """Destroy the agent. No read writes into the memory afterwards."""
        if self._agent is None:
            return
        for handle in self._handles:
            self._try(self._agent.releaseXferReq, handle)  # in flight: ends with the agent
        self._handles.clear()
        if self._peer:
            self._try(self._agent.invalidateRemoteMD, self._peer)
        if self._registered is not None:
            self._try(self._agent.deregisterMem, self._registered, [])
        self._agent = None

    @contextmanager
    def _failing(self, how: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise PeerUnreachable(f"{how}: {error!r}") from error

    def _try(self, method: Any, *given: object) -> None:
        try:
            method(*given)
        except self._errors:
            return

    def _local(self, block_ids: Sequence[int], offset: int) -> Any:
        size = self._blocks.layout.layer_bytes
        num_parts = len(block_ids) * len(self._blocks.layer_addresses)
        addresses = self._address + offset + np.arange(num_parts, dtype=np.uint64) * size
        return _descriptors(addresses, size, 0)

    def _remote(self, block_ids: Sequence[int]) -> Any:
        blocks = self._blocks
        bases = np.array(blocks.layer_addresses, dtype=np.uint64)
        strides = np.array(blocks.layer_strides, dtype=np.uint64)
        ids = np.array(block_ids, dtype=np.uint64)[:, None]
        return _descriptors(
            (bases + ids * strides).ravel(), blocks.layout.layer_bytes, blocks.device_id
        )


def _descriptors(addresses: Any, size: int, device: int) -> Any:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, size, device
    return rows


class Bay(NamedTuple):
    """Part of the staging memory of a session."""

    memory: mmap
    offset: int


@dataclass(frozen=True, slots=True)
class RunRead:
    """Blocks that are read, to be converted. Their bay is lent until it is given back.

    It is given back on the reader's thread, even if its session is closed by then.
    """

    pull: ForeignPull
    run: LayoutRun
    blocks: ForeignBlocks
    bay: Bay
    give_back: Callable[[Bay], None]

    def staged_for(self, target: KvLayout) -> StagedRun:
        layout, run = self.blocks.layout, self.run
        block_ids = self.pull.block_ids[run.target.start : run.target.stop]
        offset, num_blocks = self.bay.offset, len(run.source)
        return StagedRun(layout, target, offset, num_blocks, run.first_token, block_ids)


def remote_blocks(pull: ForeignPull, run: LayoutRun) -> tuple[int, ...]:
    return pull.kv.block_ids[run.source.start : run.source.stop]


def find_excess(kv: ForeignKv, blocks: ForeignBlocks, num_tokens: int) -> str:
    """Return why the server cannot have `num_tokens` of a prompt; empty if it can."""
    size = blocks.layout.block_size
    num_needed = -(-num_tokens // size)
    if num_tokens > kv.num_tokens or num_needed > len(kv.block_ids):
        return (
            f"{len(kv.block_ids)} blocks of {size} tokens do not hold {num_tokens} "
            f"of {kv.num_tokens} tokens"
        )
    if max(kv.block_ids) >= blocks.num_blocks:
        return f"it has {blocks.num_blocks} blocks, and no block {max(kv.block_ids)}"
    return ""


def min_run_blocks(block_size: int, remote_size: int) -> int:
    """Return the blocks of the server that a run may need for a single block here."""
    return -(-block_size // remote_size) + 1
