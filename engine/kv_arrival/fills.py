"""Fills in progress: blocks that a source writes, and that requests wait for.

A pull and a load fill blocks that no request holds, and these enter the prefix cache. The request
that caused it waits meanwhile without blocks, and then finds a longer prefix. If blocks do not
arrive, the prefix is just shorter: nothing has to be undone. A hand-off fills blocks of its own
request, and others wait for it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Protocol

from baton.core.ids import BlockId, BlockName, NodeId
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_cache.block_pool import Hold, Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.kv_transfer.types import KvReports

FillId = NewType("FillId", int)


@dataclass(slots=True, eq=False)
class Fill:
    fill_id: FillId
    prefix: ExternalPrefix
    block_ids: tuple[BlockId, ...]  # of the names in `prefix`; of a hand-off, all that are granted
    hold: Hold
    since_s: float
    late_at_s: float  # from then on, no request waits for it
    arrival: Arrival | None  # of the request that caused it; None: a peer pulls the blocks
    peer: NodeId | None  # that sends the blocks; None: a KV cache of this node
    sources: list[str | None] = field(init=False)  # of each block; None: not filled
    num_pending: int = field(init=False)  # blocks that are neither filled nor lost
    is_stale: bool = False  # the prefix cache was reset: the blocks must not be cached

    def __post_init__(self) -> None:
        self.num_pending = len(self.block_ids)
        self.sources = [None] * self.num_pending

    @property
    def num_hits(self) -> int:
        """Blocks of the prefix that were cached before."""
        return self.prefix.num_blocks - self.prefix.num_gained

    def filled_ranges(self, block_size: int) -> Iterator[tuple[str, range]]:
        """Yield the source and the tokens of each filled block of the first group."""
        groups, places = self.prefix.groups, self.prefix.places
        for source, group, place in zip(self.sources, groups, places, strict=True):
            if source is not None and not group:
                yield source, range(place * block_size, (place + 1) * block_size)


class Fills:
    def __init__(self, cache: KvCache, holds: Holds, max_wait_s: float) -> None:
        self._cache = cache
        self._holds = holds
        self._max_wait_s = max_wait_s
        self._in_progress: set[Fill] = set()
        self._num_begun = 0

    def begin(
        self,
        prefix: ExternalPrefix,
        now: float,
        arrival: Arrival | None = None,
        peer: NodeId | None = None,
    ) -> Fill:
        """Allocate the missing blocks, and hold the whole prefix, so that nothing evicts it."""
        self._cache.pool.hold(prefix.cached)
        block_ids = tuple(self._cache.prefixes.allocate(len(prefix.names)))
        # In the order of the sequence, so that the end of the prefix is evicted first.
        hold = self._holds.adopt(prefix.with_loaded(block_ids))
        return self.add(prefix, block_ids, hold, now, arrival, peer)

    def add(
        self,
        prefix: ExternalPrefix,
        block_ids: tuple[BlockId, ...],
        hold: Hold,
        now: float,
        arrival: Arrival | None,
        peer: NodeId | None,
    ) -> Fill:
        """Add a fill of blocks that `hold` holds."""
        self._num_begun += 1
        late_at_s = now + self._max_wait_s
        fill_id = FillId(self._num_begun)
        fill = Fill(fill_id, prefix, block_ids, hold, now, late_at_s, arrival, peer)
        self._in_progress.add(fill)
        return fill

    def fits(self, prefix: ExternalPrefix, num_spare: int = 0) -> bool:
        """Return whether a fill would leave `num_spare` blocks free."""
        pool = self._cache.pool
        num_needed = len(prefix.names) + pool.num_free_among(prefix.cached)
        return num_needed + num_spare <= pool.num_free

    def note_filled(self, fill: Fill, first: int, sources: Sequence[str | None]) -> None:
        """Cache the blocks from `first` on that have a source. The others are lost."""
        end = first + len(sources)
        fill.sources[first:end] = sources
        fill.num_pending -= len(sources)
        if fill.is_stale:
            return
        # The other blocks are of use only with all that is before them: `end` caches them.
        end = max(first, min(end, fill.prefix.num_independent))
        self._register(fill, first, end)

    def end(self, fill: Fill) -> None:
        """End a fill of which no block is pending."""
        self.remove(fill)
        if fill.arrival is not None and not fill.is_stale:
            self._cache_rest(fill, fill.arrival)
            for source, token_range in fill.filled_ranges(self._cache.block_size):
                fill.arrival.note_filled(source, token_range)
        self._holds.close(fill.hold)

    def remove(self, fill: Fill) -> None:
        """Remove a hand-off that no request waits for any more. Its hold stays open."""
        self._in_progress.discard(fill)

    def forget(self) -> None:
        """Cache nothing of the fills in progress."""
        for fill in self._in_progress:
            fill.is_stale = True

    def _cache_rest(self, fill: Fill, arrival: Arrival) -> None:
        """Cache the blocks, if there are any, that are of use only in a fill that is whole."""
        if None not in fill.sources:
            arrival.num_found_blocks = fill.prefix.num_blocks
            self._register(fill, fill.prefix.num_independent, len(fill.block_ids))

    def _register(self, fill: Fill, first: int, end: int) -> None:
        held = None if fill.arrival is None else fill.arrival.kv
        filled = (index for index in range(first, end) if fill.sources[index] is not None)
        self._cache.external.register_loaded(held, fill.prefix, fill.block_ids, filled)


class FillsByName:
    """Index of fills by the names of their blocks, so that no block is fetched twice."""

    def __init__(self) -> None:
        self._fill_by_name: dict[BlockName, Fill] = {}

    def add(self, fill: Fill) -> None:
        for name in fill.prefix.names:
            earlier = self._fill_by_name.get(name)
            if earlier is None or earlier.late_at_s <= fill.since_s:
                self._fill_by_name[name] = fill

    def remove(self, fill: Fill) -> None:
        for name in fill.prefix.names:
            if self._fill_by_name.get(name) is fill:
                del self._fill_by_name[name]

    def find(self, names: Iterable[BlockName]) -> Fill | None:
        """Return the fill with the first of these blocks that any has."""
        return next(filter(None, map(self._fill_by_name.get, names)), None)

    def num_leading(self, fill: Fill, names: Iterable[BlockName]) -> int:
        """Return how many of these blocks, from the first on, the fill has."""
        num_shared = 0
        for name in names:
            if self._fill_by_name.get(name) is not fill:
                break
            num_shared += 1
        return num_shared


class PrefixNeed(NamedTuple):
    """Prefix that a request can use, and what it costs to get it in another way."""

    max_num_tokens: int
    token_s: float | None  # to compute a token, or to receive it in a hand-off; None: unknown
    now_s: float
    num_spare: int  # blocks that a fill leaves free for other requests
    # Set if a hand-off brings the rest: the argument of `KvCache.find_prefix`, and its result.
    continues_at: int | None = None
    num_hits: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Fill that saves time."""

    source: KvSource
    prefix: ExternalPrefix
    saved_s: float  # compared with the other way to get the tokens
    peer: NodeId | None = None  # of `Fill`
    follows: Fill | None = None  # in progress: waiting for it is enough, or comes first


class KvSource(Protocol):
    """KV caches outside this engine of one kind. They must not block and are never trusted."""

    name: str  # of `Arrival.asked`

    def offer(self, arrival: Arrival, need: PrefixNeed, min_saved_s: float) -> Offer | None:
        """Return the fill that makes the prefix longest, or None.

        A fill that can never save time is noted in `Arrival.asked`. For any other reason, such as
        too few free blocks, the source is asked again.
        """
        ...

    def order(self, fill: Fill) -> None:
        """Order a fill that has begun."""
        ...

    def settle(self, reports: KvReports, now: float) -> list[FillId]:
        """Apply the reports of its fills, and return those that have ended."""
        ...
