"""Connection to one vLLM server: its handshake, the pulls from it, and their leases.

Owned by the reader's thread. An error ends its pulls, at worst a session; the next pull opens one.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from mmap import mmap

import zmq

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.foreign_kv import ForeignPull, ForeignPullId, ForeignRelease
from baton.kv_transfer.layout import KvLayout, LayoutRun, layout_map
from baton.kv_transfer.transports.base import UcxConfig
from baton.node.kv.foreign.config import ForeignSource
from baton.node.kv.foreign.metadata import (
    MAX_REPLY_BYTES,
    SourceRefused,
    metadata_request,
    read_reply,
)
from baton.node.kv.foreign.session import ForeignSession, RunRead, find_excess

log = logging.getLogger(__name__)

LEASE_SHARE = 5 / 6  # of a lease in which KV is used; vLLM uses it even after the lease
HEARTBEAT_SHARE = 1 / 6  # of a lease, as in vLLM
CLOCK_MARGIN_S = 5.0  # before an expiry by the server's clock
HANDSHAKE_S = 5.0
PULL_S = 10.0  # requests wait for less
AVOID_S = 10.0  # a server that does not answer, or that is refused
MAX_USED = 10_000
MAX_RELEASED = 1024


class PullFailure(Enum):
    """Reason of a failed pull, in metrics."""

    UNREACHABLE = "unreachable"  # no handshake
    REFUSED = "refused"  # its KV does not fit, or is not what the client says
    EXPIRED = "expired"  # the server may have released the blocks
    READ = "read"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class PullEnded:
    """No run of the pull follows."""

    pull_id: ForeignPullId
    failure: PullFailure | None


@dataclass(slots=True, eq=False)
class _Pull:
    order: ForeignPull
    give_up_s: float
    is_first_use: bool
    runs: deque[LayoutRun] = field(default_factory=deque)
    is_split: bool = False


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Settings that all connections of a node share."""

    layout: KvLayout  # of the node's blocks
    ucx: UcxConfig
    allocate: Callable[[int], mmap]  # called on the reader's thread
    release: Callable[[mmap], None]  # likewise


class ServerConnection:
    def __init__(
        self,
        source: ForeignSource,
        settings: ReadSettings,
        note: Callable[[RunRead | PullEnded], None],
        context: zmq.Context[zmq.Socket[bytes]],
        failures: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.source = source
        self.avoided_until_s = 0.0  # read by the engine thread
        self._settings = settings
        self._note = note
        self._context = context
        self._failures = failures
        self._clock = clock
        self._pulls: deque[_Pull] = deque()
        # Requests whose blocks the server may have released, because a pull of them has ended.
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._released: deque[ForeignKv] = deque(maxlen=MAX_RELEASED)  # until there is a session
        self._channel: SideChannel | None = None
        self._asked_s = 0.0
        self._clock_offset_s = 0.0  # of the server's clock, at most
        self._session: ForeignSession | None = None

    # --- orders -------------------------------------------------------------------

    def pull(self, order: ForeignPull, now: float) -> None:
        pull = _Pull(order, now + PULL_S, self._note_use(order.kv))
        self._pulls.append(pull)
        if not pull.is_first_use:
            self._end(pull, PullFailure.EXPIRED)
            return
        if self._session is not None:
            self._session.beat_soon()
        self._shake_hands(order.kv, now)

    def release(self, order: ForeignRelease, now: float) -> None:
        """Let the server release KV, unless it did so when its lease ended."""
        if self._note_use(order.kv) and now < order.received_s + self.source.lease_s:
            self._released.append(order.kv)
            self._shake_hands(order.kv, now)

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
        return self._session is not None and self._session.is_busy(now)

    def is_waiting(self, now: float) -> bool:
        """Return whether `advance` must be called now and then."""
        is_flushing = self._session is not None and self._session.is_flushing(now)
        return bool(self._pulls) or self._channel is not None or is_flushing

    def advance(self, now: float) -> None:
        try:
            self._take_handshake()
            if self._session is not None:
                self._take_read(self._session)
                self._begin_read(self._session, now)
                held = (pull.order.kv for pull in self._pulls)
                self._session.beat(held, HEARTBEAT_SHARE * self.source.lease_s, now)
                self._send_releases(self._session, now)
        except SourceRefused as error:
            self.fail(PullFailure.REFUSED, str(error), now)
        except PeerUnreachable as error:
            self.fail(PullFailure.READ, str(error), now)
        self._expire(now)

    def fail(self, failure: PullFailure, reason: str, now: float) -> None:
        """Close the session, and end all pulls as failed."""
        log.warning("no KV from %s: %s", self.source.address, reason)
        self.avoided_until_s = now + AVOID_S
        self.close()
        while self._pulls:
            self._end(self._pulls[0], failure)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._session is not None:
            self._session.close()
            self._session = None

    # --- the handshake ------------------------------------------------------------

    def _shake_hands(self, kv: ForeignKv, now: float) -> None:
        """Ask for the metadata of the engine that a client names, unless they are known."""
        is_known = self._session is not None and self._session.serves(kv)
        if self._channel is not None or is_known or now < self.avoided_until_s:
            return
        self._asked_s = now
        try:
            self._channel = SideChannel(self._context, self.source.host, self.source.port)
        except zmq.ZMQError as error:
            self.fail(PullFailure.UNREACHABLE, str(error), now)

    def _take_handshake(self) -> None:
        parts = None if self._channel is None else self._channel.take_reply()
        if self._channel is None or parts is None:
            return
        self._channel.close()
        self._channel = None
        settings = self._settings
        blocks, clock_s = read_reply(parts, self.source, settings.layout)
        self._clock_offset_s = clock_s - self._asked_s
        if self._session is not None and self._session.blocks == blocks:
            return
        self._end_interrupted()
        self.close()
        self._session = ForeignSession(
            blocks, settings.layout.block_size, settings.ucx, settings.allocate, settings.release
        )
        log.info(
            "reads KV from %s: engine %s, %d blocks of %d tokens, %s",
            self.source.address,
            blocks.engine_id,
            blocks.num_blocks,
            blocks.layout.block_size,
            blocks.layout.packing.value,
        )

    def _end_interrupted(self) -> None:
        """End the pull that is being read from another engine, which is gone."""
        reading = self._session and self._session.reading
        for pull in [pull for pull in self._pulls if pull.order is reading]:
            self._end(pull, PullFailure.READ)

    # --- reads --------------------------------------------------------------------

    def _take_read(self, session: ForeignSession) -> None:
        read = session.take_read()
        if read is None:
            return
        pull = next(pull for pull in self._pulls if pull.order is read.pull)
        # Asked now: the thread may have stood still since the turn began, longer than the lease.
        if self._clock() > self._usable_until_s(read.pull):
            read.give_back(read.bay)
            self._end(pull, PullFailure.EXPIRED)
            return
        self._note(read)
        if not pull.runs:
            self._end(pull, None)

    def _begin_read(self, session: ForeignSession, now: float) -> None:
        while session.can_begin and self._pulls:
            pull = self._pulls[0]
            if self._channel is not None and not session.serves(pull.order.kv):
                return  # the handshake with the engine that it names is under way
            failure = self._find_failure(pull, session, now)
            if failure is not None:
                self._end(pull, failure)
                continue
            if not pull.is_split:
                layouts = session.blocks.layout, self._settings.layout
                places, max_blocks = pull.order.places, session.max_run_blocks
                pull.runs.extend(layout_map(*layouts, places, max_blocks=max_blocks))
                pull.is_split = True
            session.begin(pull.order, pull.runs.popleft())

    def _find_failure(self, pull: _Pull, session: ForeignSession, now: float) -> PullFailure | None:
        kv, blocks = pull.order.kv, session.blocks
        if now > self._usable_until_s(pull.order):
            return PullFailure.EXPIRED
        if not session.serves(kv):
            reason = f"it is engine {blocks.engine_id} now, not {kv.engine_id}"
        else:
            num_tokens = (pull.order.places[-1] + 1) * self._settings.layout.block_size
            reason = find_excess(kv, blocks, num_tokens)
        if not reason:
            return None
        log.warning("no KV from %s: %s", self.source.address, reason)
        return PullFailure.REFUSED

    def _usable_until_s(self, order: ForeignPull) -> float:
        """Return when the KV may be gone: only the lease it began with counts, no heartbeat."""
        until_s = order.received_s + LEASE_SHARE * self.source.lease_s
        if order.kv.expires_at_s is None:
            return until_s
        return min(until_s, order.kv.expires_at_s - self._clock_offset_s - CLOCK_MARGIN_S)

    def _expire(self, now: float) -> None:
        reading = None if self._session is None else self._session.reading
        if self._channel is not None and now > self._asked_s + HANDSHAKE_S:
            self.fail(PullFailure.UNREACHABLE, f"no handshake within {HANDSHAKE_S:.0f} s", now)
        elif self._channel is None and self._session is None and self._pulls:
            self.fail(PullFailure.UNREACHABLE, "its last handshake has failed", now)
        for pull in [pull for pull in self._pulls if now > pull.give_up_s]:
            if pull.order is reading:  # nothing else ends the read
                self.fail(PullFailure.LATE, f"a pull took more than {PULL_S:.0f} s", now)
                return
            self._end(pull, PullFailure.LATE)

    def _end(self, pull: _Pull, failure: PullFailure | None) -> None:
        """End a pull and let the server release its blocks."""
        self._pulls.remove(pull)
        if failure is not None:
            self._failures[failure.value] += 1
        self._note(PullEnded(pull.order.pull_id, failure))
        if pull.is_first_use:
            self._released.append(pull.order.kv)

    def _send_releases(self, session: ForeignSession, now: float) -> None:
        while self._released:
            kv = self._released.popleft()
            if session.serves(kv):
                session.release(kv, now)


class SideChannel:
    """One request for a server's metadata."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        """Connect and send the request. Raises zmq.ZMQError for an address that cannot be used."""
        self.socket = context.socket(zmq.REQ)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            self.socket.setsockopt(zmq.IPV6, int(":" in host))
            self.socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            self.socket.send(metadata_request(), zmq.DONTWAIT)
        except zmq.ZMQError:
            self.close()
            raise

    def take_reply(self) -> list[bytes] | None:
        """Return the reply, or None while there is none."""
        try:
            return self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close(linger=0)
