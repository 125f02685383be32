"""Pulls: blocks of a prefix that a peer has and sends on request.

A pull consists of runs, each a hand-off of its own: if one fails, the blocks of the others are
cached nevertheless. The fill holds its blocks until all runs have landed or failed. The hand-off of
a run has its own hold, until no write can reach the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.ids import HandoffId, NodeId, Peer
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, FillId, Fills, FillsByName, Offer, PrefixNeed
from baton.engine.kv_arrival.receives import BlockReceives
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.kv_transfer.types import KvReports, Receive

MAX_PULLING_SHARE = 0.5  # of all blocks, for several pulls together
MIN_PULLING_BLOCKS = 8  # however small the pool is
PEER = "peer"  # source of the tokens in a request's statistics
LATENCY_S = 0.02  # of a pull of any size
BYTE_S = 1e-9  # until it is known: a GB per second
MIN_MEASURED_BYTES = 1 << 20  # smaller pulls show only the latency
SMOOTHING = 0.25
FORGET_S = 60.0  # a peer that was busy is tried again
# A pull that fails at once, such as that of evicted blocks, costs nothing. After others, requests
# compute instead of waiting again.
HARMLESS_S = 0.5
AVOID_S = 10.0


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Settings of pulls of cached prefixes from other nodes. Without peers, they do not matter."""

    name: str = ""  # of their hand-offs, unique among all processes of all nodes
    block_bytes: int = 1
    # A run is given or fails as a whole.
    max_run_blocks: int = 64
    max_run_bytes: int = 16 << 20

    @property
    def blocks_per_run(self) -> int:
        return max(1, min(self.max_run_blocks, self.max_run_bytes // self.block_bytes))


DEFAULT_PULLS = PullConfig()


class _PullRun(NamedTuple):
    """Consecutive blocks of a pull, sent under one hand-off."""

    fill: Fill
    first: int
    end: int


class PeerPulls:
    """Implements KvSource."""

    name = PEER

    def __init__(
        self, cache: KvCache, fills: Fills, receives: BlockReceives, config: PullConfig
    ) -> None:
        self._cache = cache
        self._fills = fills
        self._receives = receives
        self._config = config
        self._max_blocks = max(MIN_PULLING_BLOCKS, int(cache.pool.num_blocks * MAX_PULLING_SHARE))
        self._times = PullTimes()
        self._runs: dict[HandoffId, _PullRun] = {}  # that have neither landed nor failed
        self._pulls_by_name = FillsByName()
        self._num_runs = 0
        self.total_landed_blocks = 0
        self.total_failed_blocks = 0

    def offer(self, arrival: Arrival, need: PrefixNeed, min_saved_s: float) -> Offer | None:
        source = arrival.prefix_source
        if source is None or need.continues_at is not None:
            return None
        prefix = self._cache.external.find_promised(
            arrival.kv, need.max_num_tokens, source.num_tokens
        )
        saved_s = self._saved_s(prefix, source.peer, need)
        follows = self._pulls_by_name.find(prefix.names)
        # A second pull of blocks whose pull is late would be no faster.
        if saved_s is None or (follows is not None and follows.late_at_s <= need.now_s):
            arrival.asked.add(self.name)
            return None
        if saved_s < min_saved_s or (follows is None and not self._has_room(prefix, need)):
            return None
        return Offer(self, prefix, saved_s, source.peer.node_id, follows)

    def order(self, fill: Fill) -> None:
        """Order all runs of a pull."""
        if fill.arrival is None or fill.arrival.prefix_source is None:
            return
        peer = fill.arrival.prefix_source.peer
        self._pulls_by_name.add(fill)
        for first, end in self._run_bounds(fill.prefix):
            self._num_runs += 1
            handoff_id = HandoffId(self._config.name, self._num_runs)
            names = fill.prefix.names[first:end]
            self._runs[handoff_id] = _PullRun(fill, first, end)
            self._receives.pull(
                Receive(
                    handoff_id,
                    peer,
                    first_block=0,
                    block_ids=fill.block_ids[first:end],
                    num_tokens=len(names) * self._cache.block_size,
                    names=names,
                    request_id=fill.arrival.kv.request_id,
                )
            )

    def receive_token_s(self, peer: Peer, now: float) -> float:
        """Return the time that each token more of a hand-off from a peer takes."""
        token_bytes = self._cache.num_groups * self._config.block_bytes / self._cache.block_size
        return token_bytes * self._times.byte_s(peer.node_id, now)

    def settle(self, reports: KvReports, now: float) -> list[FillId]:
        # The holds of the hand-offs are released by `BlockReceives`.
        # Reports of hand-offs of requests name no run, and are ignored here.
        ended = [self._end_run(each.handoff_id, PEER, now) for each in reports.finished_recving]
        ended += [self._end_run(each.handoff_id, None, now) for each in reports.failed_recving]
        return [fill_id for fill_id in ended if fill_id is not None]

    def _end_run(self, handoff_id: HandoffId, source: str | None, now: float) -> FillId | None:
        """End a run. Returns the pull if it was the last one."""
        run = self._runs.pop(handoff_id, None)
        if run is None:
            return None
        num_blocks = run.end - run.first
        if source is None:
            self.total_failed_blocks += num_blocks
        else:
            self.total_landed_blocks += num_blocks
        self._fills.note_filled(run.fill, run.first, [source] * num_blocks)
        if run.fill.num_pending:
            return None
        self._pulls_by_name.remove(run.fill)
        self._fills.end(run.fill)
        self._record_time(run.fill, now)
        return run.fill.fill_id

    def _record_time(self, fill: Fill, now: float) -> None:
        if fill.peer is None:
            return
        took_s = now - fill.since_s
        if None in fill.sources:
            self._times.record_failure(fill.peer, took_s, now)
        else:
            self._times.record(fill.peer, self._num_bytes(fill.prefix), took_s, now)

    def _run_bounds(self, prefix: ExternalPrefix) -> Iterator[tuple[int, int]]:
        """Yield the runs of the blocks to be pulled.

        Blocks that are of use as a whole have runs of their own. So a peer that has to load them
        from a tier loads them together, if they fit.
        """
        num_blocks, size = len(prefix.names), self._config.blocks_per_run
        for start, end in ((0, prefix.num_independent), (prefix.num_independent, num_blocks)):
            for first in range(start, end, size):
                yield first, min(first + size, end)

    def _saved_s(self, prefix: ExternalPrefix, peer: Peer, need: PrefixNeed) -> float | None:
        """Return the time that a pull saves; None if it is not worth it."""
        pull_s = self._times.estimate_s(peer.node_id, self._num_bytes(prefix), need.now_s)
        if not prefix.names or pull_s is None or self._is_late(peer.node_id, need.now_s):
            return None
        if need.token_s is None:
            return 0.0
        saved_s = prefix.num_gained * self._cache.block_size * need.token_s - pull_s
        return saved_s if saved_s > 0 else None

    def _is_late(self, peer: NodeId, now: float) -> bool:
        """Return whether another pull from this peer takes too long."""
        fills = (run.fill for run in self._runs.values())
        return any(fill.peer == peer and fill.late_at_s <= now for fill in fills)

    def _has_room(self, prefix: ExternalPrefix, need: PrefixNeed) -> bool:
        num_pulled = self._receives.num_pulled_blocks
        if num_pulled and num_pulled + len(prefix.names) > self._max_blocks:
            return False
        return self._fills.fits(prefix, need.num_spare)

    def _num_bytes(self, prefix: ExternalPrefix) -> int:
        return len(prefix.names) * self._config.block_bytes


@dataclass(frozen=True, slots=True)
class _Measured:
    byte_s: float
    at_s: float


class PullTimes:
    """Estimates, from past pulls, how long a pull from a peer takes."""

    def __init__(self) -> None:
        self._measured: dict[NodeId, _Measured] = {}
        self._avoided_until_s: dict[NodeId, float] = {}

    def estimate_s(self, peer: NodeId, num_bytes: int, now: float) -> float | None:
        """Return the time that a pull takes; None if the peer is to be avoided."""
        if now < self._avoided_until_s.get(peer, now):
            return None
        return LATENCY_S + num_bytes * self.byte_s(peer, now)

    def byte_s(self, peer: NodeId, now: float) -> float:
        """Return the time that each byte from a peer takes."""
        measured = self._measured.get(peer)
        is_known = measured is not None and now - measured.at_s < FORGET_S
        return measured.byte_s if measured is not None and is_known else BYTE_S

    def record(self, peer: NodeId, num_bytes: int, seconds: float, now: float) -> None:
        """Record a pull that has landed."""
        if num_bytes < MIN_MEASURED_BYTES:
            return
        self._forget_old(now)
        byte_s = max(0.0, seconds - LATENCY_S) / num_bytes
        before = self._measured.get(peer)
        if before is not None:
            byte_s = before.byte_s + SMOOTHING * (byte_s - before.byte_s)
        self._measured[peer] = _Measured(byte_s, now)

    def record_failure(self, peer: NodeId, seconds: float, now: float) -> None:
        """Record a pull that was lost, or that requests no longer wait for."""
        self._forget_old(now)
        if seconds >= HARMLESS_S:
            self._avoided_until_s[peer] = now + AVOID_S

    def _forget_old(self, now: float) -> None:
        """Drop what no longer counts: nodes come and go."""
        self._measured = {
            peer: each for peer, each in self._measured.items() if now - each.at_s < FORGET_S
        }
        self._avoided_until_s = {
            peer: until_s for peer, until_s in self._avoided_until_s.items() if now < until_s
        }
