"""Interface of a kind of memory in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from baton.core.ids import BlockId
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_hit import PrefixHit


class CachedBlocks(Protocol):
    """Blocks by name: the pool's, or those of another cache as well."""

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockId]: ...

    def is_cached(self, block_hash: BlockHash) -> bool: ...


class PlacedBlock(NamedTuple):
    """A block of a prefix, and the place in the block tables that it belongs to."""

    place: int
    name: BlockHash
    block_id: BlockId


class CacheGroup(Protocol):
    """Memory of some layers of a model: full attention, a window or chunk, or recurrent state.

    In all methods, `position` is that of the next token that is computed on this node, and blocks
    are numbered by their place in the sequence.
    """

    number: int  # index of its blocks in a `PrefixHit`
    is_whole: bool  # its blocks of a prefix are of use only together

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the names of the blocks that it may have at the end of this block of tokens."""
        ...

    def longest_prefix(
        self,
        cached: CachedBlocks,
        hashes: Sequence[BlockHash],
        num_blocks: int,
        continues_at: int | None,
    ) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that it can continue.

        `continues_at` is the position of the next token, if that is not at the end of the prefix.
        """
        ...

    def find(
        self,
        cached: CachedBlocks,
        hashes: Sequence[BlockHash],
        num_blocks: int,
        continues_at: int | None,
    ) -> list[BlockId]:
        """Return its cached blocks of a prefix that it can continue."""
        ...

    def placed(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> Iterable[PlacedBlock]:
        """Return the blocks of `find` with their names, in the order in which they are loaded."""
        ...

    def num_allocated(self, num_blocks: int, num_hits: int, position: int) -> int:
        """Return the number of blocks that `allocate` takes from the pool."""
        ...

    def allocate(self, held: HeldKv, hit: PrefixHit, num_blocks: int, position: int) -> None:
        """Give a request its blocks for `num_blocks` blocks of tokens, those of the hit included.

        The caller has checked that there are enough, and holds the hit for the request.
        """
        ...

    def register_loaded(self, held: HeldKv, blocks: Sequence[PlacedBlock]) -> None:
        """Add loaded blocks to the prefix cache."""
        ...

    def num_held(self, held: HeldKv) -> int:
        """Return the number of its blocks that a request holds."""
        ...

    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted unless the request has the blocks that it needs of the group."""
        ...
