"""The scheduler's half of pulls: blocks of a prefix that a peer has and sends on request.

A pull fills blocks that no request holds and adds them to the prefix cache. The request that caused
it waits meanwhile without blocks, and then finds a longer prefix. A pull consists of runs, each a
hand-off of its own: if one fails, the blocks of the others are cached nevertheless.

A pull has its own reference on each of its blocks until all runs have landed or failed. The
hand-off of a run has another one, until no write can reach the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.ids import BlockId, HandoffId, Peer
from baton.engine.kv_arrival.handoffs import HandoffManager
from baton.engine.kv_arrival.pull_times import PullTimes
from baton.engine.kv_cache.external_prefix import SNAPSHOT, ExternalPrefix
from baton.engine.kv_cache.manager import KvCache
from baton.engine.scheduler.request import Request
from baton.kv_transfer.types import KvReports, Receive

MAX_PULLING_SHARE = 0.5  # of all blocks, for several pulls together
LEAST_BLOCKS = 8  # for pulls, however small the pool is
PEER = "peer"  # source of the tokens in a request's statistics


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Settings of pulls of cached prefixes from other nodes."""

    name: str  # of their hand-offs, unique among all processes of all nodes
    block_bytes: int
    # A run is given or fails as a whole.
    max_run_blocks: int = 64
    max_run_bytes: int = 16 << 20

    @property
    def blocks_per_run(self) -> int:
        return max(1, min(self.max_run_blocks, self.max_run_bytes // self.block_bytes))


@dataclass(frozen=True, slots=True)
class PullOffer:
    """A pull that is worth it: of its own, or one that another request has started."""

    prefix: ExternalPrefix
    source: Peer
    saved_s: float  # compared with computing the tokens
    follows: HandoffId | None = None


@dataclass(slots=True)
class _Pull:
    request: Request
    source: Peer
    prefix: ExternalPrefix
    block_ids: tuple[BlockId, ...]  # to be filled
    since_s: float
    num_open: int = 0  # runs that have neither landed nor failed
    num_leading: int = 0  # blocks before the first one that failed
    is_stale: bool = False  # the prefix cache was reset: the blocks must not be cached
    is_overdue: bool = False  # no request waits for it any longer

    @property
    def held(self) -> list[BlockId]:
        """The whole prefix in order, so that its end is evicted first."""
        return self.prefix.with_loaded(self.block_ids)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of a pull, sent under one hand-off."""

    pull_id: HandoffId
    first: int
    end: int


class PrefixPulls:
    def __init__(
        self,
        cache: KvCache,
        handoffs: HandoffManager,
        config: PullConfig | None,  # None: without pulls
        max_wait_s: float,
    ) -> None:
        self._cache = cache
        self._handoffs = handoffs
        self._config = config
        self._max_wait_s = max_wait_s
        self._max_blocks = max(LEAST_BLOCKS, int(cache.pool.num_blocks * MAX_PULLING_SHARE))
        self._times = PullTimes()
        self._pulls: dict[HandoffId, _Pull] = {}  # by the hand-off of the first run
        self._runs: dict[HandoffId, _Run] = {}  # that have neither landed nor failed
        self._pull_by_name: dict[bytes, HandoffId] = {}  # of the blocks of these runs
        self._num_written: dict[HandoffId, int] = {}  # blocks of runs that the peer may write
        self._num_runs = 0
        self.total_landed_blocks = 0
        self.total_failed_blocks = 0

    def held_blocks(self) -> Iterator[BlockId]:
        for pull in self._pulls.values():
            yield from pull.held

    # --- orders -------------------------------------------------------------------

    def find_offer(
        self,
        request: Request,
        max_num_tokens: int,
        now: float,
        token_s: float | None,
        num_spare: int = 0,
    ) -> PullOffer | None:
        """Return a pull that makes the request's prefix longer in less time than computing it.

        `token_s` is the time to compute a token, if it is known. `num_spare` blocks stay free. Each
        request pulls once.
        """
        source = request.spec.prefix_source
        if source is None or not request.may_pull or self._config is None:
            return None
        prefix = self._cache.find_promised(request.kv, max_num_tokens, source.num_tokens)
        saved_s = self._saved_s(prefix, source.peer, now, token_s)
        if saved_s is None:
            request.may_pull = False
            return None
        follows = self._find_pull_of(prefix)
        if follows is not None and self._pulls[follows].is_overdue:
            request.may_pull = False
            return None
        if follows is None and not self._has_room(prefix, num_spare):
            return None
        return PullOffer(prefix, source.peer, saved_s, follows)

    def receive_s(self, peer: Peer, num_blocks: int, now: float) -> float:
        """Return the time that so many blocks more of a hand-off from a peer take."""
        return num_blocks * self._block_bytes * self._times.byte_s(peer.node_id, now)

    def start(self, request: Request, offer: PullOffer, now: float) -> HandoffId:
        """Order the pull, unless it has been started. Returns its id, to wait for."""
        if offer.follows is not None:
            return offer.follows
        request.may_pull = False
        prefix = offer.prefix
        self._cache.pool.hold(prefix.cached)
        block_ids = tuple(self._cache.allocate_loaded(len(prefix.names)))
        pull = _Pull(request, offer.source, prefix, block_ids, now, num_leading=len(block_ids))
        pull_id = self._next_id()
        self._pulls[pull_id] = pull
        self._order_runs(pull_id, pull)
        return pull_id

    def clear(self) -> None:
        """Cache nothing of the pulls in progress."""
        for pull in self._pulls.values():
            pull.is_stale = True

    def _order_runs(self, pull_id: HandoffId, pull: _Pull) -> None:
        for first, end in self._run_bounds(pull.prefix):
            handoff_id = self._next_id() if first else pull_id
            run = self._runs[handoff_id] = _Run(pull_id, first, end)
            names = pull.prefix.names[run.first : run.end]
            self._pull_by_name.update(dict.fromkeys(names, pull_id))
            self._num_written[handoff_id] = len(names)
            pull.num_open += 1
            self._handoffs.pull(
                Receive(
                    handoff_id,
                    pull.source,
                    first_block=0,
                    block_ids=pull.block_ids[run.first : run.end],
                    num_tokens=len(names) * self._cache.block_size,
                    names=names,
                    request_id=pull.request.request_id,
                )
            )

    # --- reports ------------------------------------------------------------------

    def take_overdue(self, now: float) -> list[HandoffId]:
        """Return, once, the pulls that requests must not wait for any longer."""
        overdue = [
            pull_id
            for pull_id, pull in self._pulls.items()
            if not pull.is_overdue and now - pull.since_s >= self._max_wait_s
        ]
        for pull_id in overdue:
            pull = self._pulls[pull_id]
            pull.is_overdue = True
            self._times.record_failure(pull.source.node_id, now - pull.since_s, now)
        return overdue

    def settle(self, reports: KvReports, now: float) -> list[HandoffId]:
        """Apply the ends of runs. Returns the pulls that have ended.

        The hand-offs' references on the blocks are released by `HandoffManager`.
        """
        ended: list[HandoffId] = []
        for landed in reports.finished_recving:
            self._num_written.pop(landed.handoff_id, None)
            ended += self._end_run(landed.handoff_id, now, has_landed=True)
        for lost in reports.failed_recving:
            ended += self._end_run(lost.handoff_id, now, has_landed=False)
        for handoff_id in reports.released:
            self._num_written.pop(handoff_id, None)
        return ended

    def _end_run(self, handoff_id: HandoffId, now: float, *, has_landed: bool) -> list[HandoffId]:
        run = self._runs.pop(handoff_id, None)
        if run is None:
            return []
        pull = self._pulls[run.pull_id]
        part = pull.prefix.part(run.first, run.end)
        for name in part.names:
            del self._pull_by_name[name]
        if has_landed:
            self._land(pull, part, pull.block_ids[run.first : run.end])
        else:
            pull.num_leading = min(pull.num_leading, run.first)
            self.total_failed_blocks += len(part.names)
        pull.num_open -= 1
        if pull.num_open:
            return []
        self._end_pull(run.pull_id, now)
        return [run.pull_id]

    def _land(self, pull: _Pull, part: ExternalPrefix, block_ids: tuple[BlockId, ...]) -> None:
        self.total_landed_blocks += len(block_ids)
        if not pull.is_stale:
            are_blocks = [group != SNAPSHOT for group in part.groups]
            self._cache.register_loaded(pull.request.kv, part, block_ids, are_blocks)

    def _end_pull(self, pull_id: HandoffId, now: float) -> None:
        pull = self._pulls.pop(pull_id)
        is_whole = pull.num_leading == len(pull.block_ids)
        if is_whole and not pull.is_stale:
            first = pull.prefix.num_loaded_before_snapshot
            parts, block_ids = pull.prefix.part(first), pull.block_ids[first:]
            self._cache.register_loaded(pull.request.kv, parts, block_ids, [True] * len(block_ids))
        self._cache.pool.release(pull.held)
        took_s, peer = now - pull.since_s, pull.source.node_id
        if not is_whole:
            self._times.record_failure(peer, took_s, now)
        else:
            self._times.record(peer, self._num_bytes(pull.prefix), took_s, now)
            pull.request.num_found_blocks = 0 if pull.is_stale else pull.prefix.num_blocks
        if pull.num_leading and not (pull.is_stale or pull.is_overdue):
            ranges = pull.prefix.token_ranges(self._cache.block_size)[: pull.num_leading]
            for token_range in filter(None, ranges):
                pull.request.note_loaded(PEER, token_range)

    # --- helpers ------------------------------------------------------------------

    def _run_bounds(self, prefix: ExternalPrefix) -> Iterator[tuple[int, int]]:
        """Yield the runs of the blocks to be pulled. A snapshot has runs of its own.

        So a peer that has to load it from a tier loads all its parts together, if they fit.
        """
        num_blocks, size = len(prefix.names), self._run_size
        snapshot = prefix.num_loaded_before_snapshot
        for start, end in ((0, snapshot), (snapshot, num_blocks)):
            for first in range(start, end, size):
                yield first, min(first + size, end)

    def _saved_s(
        self, prefix: ExternalPrefix, peer: Peer, now: float, token_s: float | None
    ) -> float | None:
        """Return the time that a pull saves; None if it is not worth it."""
        pull_s = self._times.estimate_s(peer.node_id, self._num_bytes(prefix), now)
        if not prefix.names or pull_s is None:
            return None
        if token_s is None:
            return 0.0
        saved_s = prefix.num_gained * self._cache.block_size * token_s - pull_s
        return saved_s if saved_s > 0 else None

    def _find_pull_of(self, prefix: ExternalPrefix) -> HandoffId | None:
        """Return the pull in progress that has the first of these blocks that any has."""
        return next(filter(None, map(self._pull_by_name.get, prefix.names)), None)

    def _has_room(self, prefix: ExternalPrefix, num_spare: int) -> bool:
        num_missing, pool = len(prefix.names), self._cache.pool
        num_written = sum(self._num_written.values())
        if num_written and num_written + num_missing > self._max_blocks:
            return False
        return num_missing + pool.num_free_among(prefix.cached) + num_spare <= pool.num_free

    def _num_bytes(self, prefix: ExternalPrefix) -> int:
        return len(prefix.names) * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return 0 if self._config is None else self._config.block_bytes

    @property
    def _run_size(self) -> int:
        return 1 if self._config is None else self._config.blocks_per_run

    def _next_id(self) -> HandoffId:
        self._num_runs += 1
        return HandoffId("" if self._config is None else self._config.name, self._num_runs)
