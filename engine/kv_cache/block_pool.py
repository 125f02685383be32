"""Block pool of the KV cache: reference counts, prefix cache and LRU eviction.

Works on block ids and hashes, independent of requests. A block is free when its reference count
is zero. A free block that has a hash is still cached. Such blocks are allocated last, in the order
in which they were released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.ids import BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash


class BlockPool:
    """Each operation takes time proportional to the blocks it names, not to the pool's size."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_cnt = [0] * num_blocks
        # Popped from the end, so that a new pool allocates adjacent blocks in ascending order.
        self._uncached_free = [BlockId(n) for n in reversed(range(num_blocks))]
        self._cached_free: OrderedDict[BlockId, None] = OrderedDict()
        self._evicted_first: set[BlockId] = set()  # once they are free
        self._hash_by_block: dict[BlockId, BlockHash] = {}
        self._block_by_hash: dict[BlockHash, BlockId] = {}
        self.num_releases = 0  # incremented when blocks may have become free
        self._evicted: list[BlockHash] = []

    @property
    def num_free(self) -> int:
        return len(self._uncached_free) + len(self._cached_free)

    @property
    def num_cached_free(self) -> int:
        return len(self._cached_free)

    @property
    def num_cached(self) -> int:
        return len(self._block_by_hash)

    @property
    def names(self) -> Iterable[BlockHash]:
        """The names of all cached blocks."""
        return self._block_by_hash.keys()

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate `count` blocks, one reference each. Returns None if there are too few."""
        if count > self.num_free:
            return None
        taken = [self._uncached_free.pop() for _ in range(min(count, len(self._uncached_free)))]
        while len(taken) < count:
            taken.append(self._evict())
        for block_id in taken:
            self._ref_cnt[block_id] = 1
        return taken

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Return the cached blocks of the longest known prefix, without holding them."""
        found = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def is_cached(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_by_hash

    def name_of(self, block_id: BlockId) -> BlockHash | None:
        """Return the name of a cached block, or None if it is not cached."""
        return self._hash_by_block.get(block_id)

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        return sum(1 for block_id in block_ids if not self._ref_cnt[block_id])

    def num_held_once(self, block_ids: Iterable[BlockId]) -> int:
        """Return the number of blocks with exactly one reference."""
        return sum(1 for block_id in block_ids if self._ref_cnt[block_id] == 1)

    def num_references(self, block_id: BlockId) -> int:
        return self._ref_cnt[block_id]

    def hold(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference to each block: for a prefix hit, or for a hand-off."""
        for block_id in block_ids:
            if not self._ref_cnt[block_id]:
                del self._cached_free[block_id]
            self._ref_cnt[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop a reference from each block. The last blocks of a sequence are evicted first."""
        self.num_releases += 1
        for block_id in reversed(block_ids):
            self._ref_cnt[block_id] -= 1
            if self._ref_cnt[block_id]:
                continue
            if block_id in self._hash_by_block:
                self._cached_free[block_id] = None
            else:
                self._uncached_free.append(block_id)
        if self._evicted_first:
            self._move_to_front(block_ids)

    def evict_first(self, block_ids: Iterable[BlockId]) -> None:
        """Let these held blocks be evicted before all others once they are free."""
        self._evicted_first.update(block_ids)

    def evict_in_turn(self, block_ids: Iterable[BlockId]) -> None:
        """Undo `evict_first`."""
        if self._evicted_first:
            self._evicted_first.difference_update(block_ids)

    def register(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Add a complete block to the prefix cache. Returns False if its hash is there already."""
        if block_hash in self._block_by_hash:
            return False
        self._block_by_hash[block_hash] = block_id
        self._hash_by_block[block_id] = block_hash
        return True

    def unregister(self, block_ids: Iterable[BlockId]) -> None:
        """Remove blocks from the prefix cache. References on them remain."""
        for block_id in block_ids:
            block_hash = self._hash_by_block.pop(block_id, None)
            if block_hash is None:
                continue
            del self._block_by_hash[block_hash]
            self._evicted.append(block_hash)
            if not self._ref_cnt[block_id]:
                del self._cached_free[block_id]
                self._uncached_free.append(block_id)

    def forget_hashes(self) -> None:
        """Empty the prefix cache. References on its blocks remain."""
        self._uncached_free.extend(self._cached_free)
        self._cached_free.clear()
        self._hash_by_block.clear()
        self._block_by_hash.clear()
        self._evicted.clear()

    def take_evicted(self) -> tuple[BlockHash, ...]:
        """Return the hashes evicted since the last call."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def check(self, held: Iterable[BlockId]) -> None:
        """Raise BlocksUnaccounted unless `held`, one entry per reference, matches the pool."""
        expected = [0] * self.num_blocks
        for block_id in held:
            expected[block_id] += 1
        for place, (counted, found) in enumerate(zip(self._ref_cnt, expected, strict=True)):
            if counted != found:
                raise BlocksUnaccounted(f"block {place}: ref_cnt {counted}, holders {found}")
        if any(not self._ref_cnt[block_id] for block_id in self._evicted_first):
            raise BlocksUnaccounted("a free block waits to be evicted first")
        free = [*self._uncached_free, *self._cached_free]
        unheld = [place for place, count in enumerate(expected) if not count]
        if sorted(free) != unheld:
            raise BlocksUnaccounted(f"free: {sorted(free)}, without references: {unheld}")
        self._check_hashes()

    def _move_to_front(self, block_ids: Sequence[BlockId]) -> None:
        """Let those of the blocks that are free and marked be evicted first, the last one first."""
        for block_id in block_ids:
            if not self._ref_cnt[block_id] and block_id in self._evicted_first:
                self._evicted_first.discard(block_id)
                if block_id in self._cached_free:
                    self._cached_free.move_to_end(block_id, last=False)

    def _check_hashes(self) -> None:
        there = {block_hash: block_id for block_id, block_hash in self._hash_by_block.items()}
        if there != self._block_by_hash:
            raise BlocksUnaccounted("the two maps of block hashes differ")
        if not self._hash_by_block.keys() >= self._cached_free.keys():
            raise BlocksUnaccounted("a cached free block has no hash")
        if not self._hash_by_block.keys().isdisjoint(self._uncached_free):
            raise BlocksUnaccounted("an uncached free block has a hash")

    def _evict(self) -> BlockId:
        block_id, _ = self._cached_free.popitem(last=False)
        block_hash = self._hash_by_block.pop(block_id)
        del self._block_by_hash[block_hash]
        self._evicted.append(block_hash)
        return block_id


@dataclass(slots=True, eq=False)
class Hold:
    """One reference on each of these blocks."""

    block_ids: list[BlockId] = field(default_factory=list)


class Holds:
    """Blocks that fills, stores, sends and receives hold, independently of any request.

    A request can end while a peer still writes its blocks, or while a tier still copies them. So
    whatever accesses blocks has its own reference on each of them, until its end is reported.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: set[Hold] = set()

    def open(self, block_ids: Iterable[BlockId] = ()) -> Hold:
        hold = Hold()
        self._open.add(hold)
        self.add(hold, block_ids)
        return hold

    def adopt(self, block_ids: Iterable[BlockId]) -> Hold:
        """Open a hold with references that the caller has."""
        hold = self.open()
        hold.block_ids += block_ids
        return hold

    def add(self, hold: Hold, block_ids: Iterable[BlockId]) -> None:
        added = list(block_ids)
        self._pool.hold(added)
        hold.block_ids += added

    def close(self, hold: Hold) -> None:
        """Release the blocks. Those that are cached are evicted from the last one on."""
        self._open.remove(hold)
        self._pool.release(hold.block_ids)

    def block_ids(self) -> Iterator[BlockId]:
        """Yield each block, once per hold."""
        for hold in self._open:
            yield from hold.block_ids
