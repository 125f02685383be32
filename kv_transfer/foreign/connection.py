"""Connection to one vLLM server: its handshake, its reads one after the other, and its leases.

Owned by the reader's thread. Whatever goes wrong ends the pulls concerned as failed, and at worst
the connection, which the next pull opens again.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from mmap import mmap
from typing import NamedTuple

import zmq

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.foreign.config import ForeignSource
from baton.kv_transfer.foreign.metadata import ForeignBlocks, KvShape, SourceRefused, read_reply
from baton.kv_transfer.foreign.nixl_reads import NixlReads
from baton.kv_transfer.foreign.runs import Run, find_excess, min_run_blocks, split_pull
from baton.kv_transfer.foreign.side_channel import SideChannel
from baton.kv_transfer.foreign.types import ForeignPull, ForeignPullId
from baton.kv_transfer.transports.base import UcxConfig

log = logging.getLogger(__name__)

LEASE_SHARE = 5 / 6  # of a lease in which KV is used; vLLM uses it even after the lease
HEARTBEAT_SHARE = 1 / 6  # of a lease, as in vLLM
CLOCK_MARGIN_S = 5.0  # before an expiry by the server's clock
HANDSHAKE_S = 5.0
PULL_S = 10.0  # requests wait for less
AVOID_S = 10.0  # a server that does not answer, or that is refused
LINGER_S = 0.1  # for which UCX is driven often after a notification
FLUSH_S = 5.0  # and then now and then: nothing confirms that it has left
MAX_USED = 10_000
NUM_BAYS = 2  # parts of the staging memory: one is read into while the other is converted
BAY_BYTES = 16 << 20


class Failure(Enum):
    """Reason of a failed pull, in metrics."""

    UNREACHABLE = "unreachable"  # no handshake
    REFUSED = "refused"  # its KV does not fit, or is not what the client says
    EXPIRED = "expired"  # the server may have released the blocks
    READ = "read"
    LATE = "late"


class Bay(NamedTuple):
    """Part of the staging memory of a connection."""

    memory: mmap
    offset: int


@dataclass(frozen=True, slots=True)
class RunRead:
    """Blocks that are read, to be converted. Their bay is lent until `give_back`."""

    pull: ForeignPull
    run: Run
    blocks: ForeignBlocks
    bay: Bay


@dataclass(frozen=True, slots=True)
class PullEnded:
    """No run of the pull follows."""

    pull_id: ForeignPullId
    failure: Failure | None


@dataclass(slots=True, eq=False)
class _Pull:
    order: ForeignPull
    give_up_s: float
    runs: deque[Run] = field(default_factory=deque)
    is_split: bool = False
    is_first_use: bool = True


@dataclass(frozen=True, slots=True)
class _Read:
    pull: _Pull
    run: Run
    bay: Bay
    handle: int


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What all connections of a node share."""

    shape: KvShape
    block_size: int
    ucx: UcxConfig
    allocate: Callable[[int], mmap]
    note: Callable[[RunRead | PullEnded], None]


class Connection:
    def __init__(
        self,
        source: ForeignSource,
        settings: ReadSettings,
        context: zmq.Context[zmq.Socket[bytes]],
        failures: Counter[str],
    ) -> None:
        self.source = source
        self.avoided_until_s = 0.0  # read by the engine thread
        self._settings = settings
        self._context = context
        self._failures = failures
        self._pulls: deque[_Pull] = deque()
        # Requests whose blocks the server may have released, because a pull of them has ended.
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._released: deque[ForeignKv] = deque(maxlen=1024)  # until there is a connection
        self._channel: SideChannel | None = None
        self._asked_s = 0.0
        self._blocks: ForeignBlocks | None = None
        self._clock_offset_s = 0.0  # of the server's clock, at most
        self._reads: NixlReads | None = None
        self._bays: list[Bay] = []  # that are free
        self._run_blocks = 0
        self._reading: _Read | None = None
        self._beat_s = 0.0
        self._lingers_until_s = 0.0

    # --- orders -------------------------------------------------------------------

    def pull(self, order: ForeignPull, now: float) -> None:
        pull = _Pull(order, now + PULL_S)
        self._pulls.append(pull)
        pull.is_first_use = self._note_use(order.kv)
        if not pull.is_first_use:
            self._end(pull, Failure.EXPIRED)
            return
        self._beat_s = 0.0  # the server learns of each pull at once
        self._shake_hands(order.kv, now)

    def release(self, kv: ForeignKv, now: float) -> None:
        if not self._note_use(kv):
            return
        self._released.append(kv)
        self._shake_hands(kv, now)

    def give_back(self, bay: Bay) -> None:
        if self._reads is not None and bay.memory is self._memory:
            self._bays.append(bay)

    def usable_until_s(self, kv: ForeignKv, received_s: float) -> float:
        """Return when the KV may be gone: only the lease it began with counts, no heartbeat."""
        until_s = received_s + LEASE_SHARE * self.source.lease_s
        if kv.expires_at_s is None or self._blocks is None:
            return until_s
        return min(until_s, kv.expires_at_s - self._clock_offset_s - CLOCK_MARGIN_S)

    def _note_use(self, kv: ForeignKv) -> bool:
        """Return whether this is the first use of KV. Its release follows, whatever happens."""
        key = kv.engine_id, kv.request_id
        if key in self._used:
            return False
        self._used[key] = None
        if len(self._used) > MAX_USED:
            self._used.popitem(last=False)
        return True

    # --- progress -----------------------------------------------------------------

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """The socket of a handshake, to be polled."""
        return None if self._channel is None else self._channel.socket

    def is_busy(self, now: float) -> bool:
        """Return whether `advance` must be called often."""
        return self._reading is not None or now < self._lingers_until_s

    def is_waiting(self, now: float) -> bool:
        """Return whether `advance` must be called now and then."""
        is_flushing = now < self._lingers_until_s + FLUSH_S
        return bool(self._pulls) or self._channel is not None or is_flushing

    def advance(self, now: float) -> None:
        try:
            self._take_handshake(now)
            if self._reads is not None and self._blocks is not None:
                self._reads.progress()
                self._send_heartbeat(self._reads, now)
                self._end_read(self._reads, self._blocks, now)
                self._begin_read(self._reads, self._blocks, now)
                self._send_releases(self._reads, now)
        except SourceRefused as error:
            self.fail(Failure.REFUSED, str(error), now)
        except PeerUnreachable as error:
            self.fail(Failure.READ, str(error), now)
        self._expire(now)

    def fail(self, failure: Failure, reason: str, now: float) -> None:
        """Close the connection, and end all pulls as failed."""
        log.warning("no KV from %s: %s", self.source.address, reason)
        self.avoided_until_s = now + AVOID_S
        self.close()
        self._released.clear()
        while self._pulls:
            self._end(self._pulls[0], failure)

    def close(self) -> None:
        """Destroy the agent: nothing is read into the staging memory afterwards."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._reads is not None:
            self._reads.close()
        self._reads = self._blocks = self._reading = None
        self._bays = []

    # --- the handshake ------------------------------------------------------------

    def _shake_hands(self, kv: ForeignKv, now: float) -> None:
        """Ask for the metadata of the engine that a client names, unless they are known."""
        is_known = self._blocks is not None and self._blocks.engine_id == kv.engine_id
        if self._channel is not None or is_known or now < self.avoided_until_s:
            return
        self._asked_s = now
        try:
            self._channel = SideChannel(self._context, self.source.host, self.source.port)
        except zmq.ZMQError as error:
            self.fail(Failure.UNREACHABLE, str(error), now)

    def _take_handshake(self, now: float) -> None:
        parts = None if self._channel is None else self._channel.take_reply()
        if self._channel is None or parts is None:
            return
        self._channel.close()
        self._channel = None
        blocks, clock_s = read_reply(parts, self.source, self._settings.shape)
        self._clock_offset_s = clock_s - self._asked_s
        if self._blocks != blocks:
            self._open(blocks)

    def _open(self, blocks: ForeignBlocks) -> None:
        """Connect to another engine at the address. Reads of the one before fail with it."""
        interrupted = self._reading
        self.close()
        if interrupted is not None:
            self._end(interrupted.pull, Failure.READ)
        num_needed = min_run_blocks(self._settings.block_size, blocks.block_size)
        self._run_blocks = max(num_needed, BAY_BYTES // blocks.block_bytes)
        bay_bytes = self._run_blocks * blocks.block_bytes
        self._memory = self._settings.allocate(NUM_BAYS * bay_bytes)
        self._reads = NixlReads(blocks, self._memory, self._settings.ucx)
        self._bays = [Bay(self._memory, index * bay_bytes) for index in range(NUM_BAYS)]
        self._blocks = blocks
        log.info(
            "reads KV from %s: engine %s, %d blocks of %d tokens, %s",
            self.source.address,
            blocks.engine_id,
            blocks.num_blocks,
            blocks.block_size,
            blocks.packing.value,
        )

    # --- reads --------------------------------------------------------------------

    def _end_read(self, reads: NixlReads, blocks: ForeignBlocks, now: float) -> None:
        read = self._reading
        if read is None or not reads.is_read(read.handle):
            return
        self._reading = None
        order = read.pull.order
        if now > self.usable_until_s(order.kv, order.received_s):
            self._bays.append(read.bay)
            self._end(read.pull, Failure.EXPIRED)
            return
        self._settings.note(RunRead(order, read.run, blocks, read.bay))
        if not read.pull.runs:
            self._end(read.pull, None)

    def _begin_read(self, reads: NixlReads, blocks: ForeignBlocks, now: float) -> None:
        while self._reading is None and self._bays and self._pulls:
            pull = self._pulls[0]
            failure = self._find_failure(pull, blocks, now)
            if failure is not None:
                self._end(pull, failure)
                continue
            if self._channel is not None and pull.order.kv.engine_id != blocks.engine_id:
                return  # the handshake with the engine that it names is under way
            if not pull.is_split:
                size, remote_size = self._settings.block_size, blocks.block_size
                pull.runs.extend(split_pull(pull.order, size, remote_size, self._run_blocks))
                pull.is_split = True
            run, bay = pull.runs.popleft(), self._bays.pop()
            handle = reads.read(run.remote_block_ids, bay.offset)
            self._reading = _Read(pull, run, bay, handle)

    def _find_failure(self, pull: _Pull, blocks: ForeignBlocks, now: float) -> Failure | None:
        order = pull.order
        if now > self.usable_until_s(order.kv, order.received_s):
            return Failure.EXPIRED
        if order.kv.engine_id != blocks.engine_id:
            if self._channel is not None:
                return None
            log.warning(
                "no KV from %s: it is engine %s now, and has none of engine %s",
                self.source.address,
                blocks.engine_id,
                order.kv.engine_id,
            )
            return Failure.REFUSED
        num_tokens = (order.places[-1] + 1) * self._settings.block_size
        excess = "" if pull.is_split else find_excess(order.kv, blocks, num_tokens)
        if excess:
            log.warning("no KV from %s: %s", self.source.address, excess)
            return Failure.REFUSED
        return None

    def _expire(self, now: float) -> None:
        if self._channel is not None and now > self._asked_s + HANDSHAKE_S:
            self.fail(Failure.UNREACHABLE, f"no handshake within {HANDSHAKE_S:.0f} s", now)
        elif self._channel is None and self._reads is None and self._pulls:
            self.fail(Failure.UNREACHABLE, "its last handshake has failed", now)
        elif self._reading is not None and now > self._reading.pull.give_up_s:
            self.fail(Failure.LATE, f"a pull took more than {PULL_S:.0f} s", now)
        for pull in [pull for pull in self._pulls if now > pull.give_up_s]:
            self._end(pull, Failure.LATE)

    def _end(self, pull: _Pull, failure: Failure | None) -> None:
        """End a pull and let the server release its blocks."""
        self._pulls.remove(pull)
        if failure is not None:
            self._failures[failure.value] += 1
        self._settings.note(PullEnded(pull.order.pull_id, failure))
        if pull.is_first_use:
            self._released.append(pull.order.kv)

    # --- notifications ------------------------------------------------------------

    def _send_releases(self, reads: NixlReads, now: float) -> None:
        engine_id = None if self._blocks is None else self._blocks.engine_id
        for kv in self._take_released():
            if kv.engine_id == engine_id:
                reads.notify(f"{kv.request_id}:1")  # the number of nodes that read the blocks
                self._lingers_until_s = now + LINGER_S

    def _take_released(self) -> Iterator[ForeignKv]:
        while self._released:
            yield self._released.popleft()

    def _send_heartbeat(self, reads: NixlReads, now: float) -> None:
        engine_id = None if self._blocks is None else self._blocks.engine_id
        held = [pull.order.kv for pull in self._pulls]
        names = [kv.request_id for kv in held if kv.engine_id == engine_id]
        if names and now >= self._beat_s + HEARTBEAT_SHARE * self.source.lease_s:
            self._beat_s = now
            reads.notify("HB:" + ",".join(names))
            self._lingers_until_s = now + LINGER_S
