"""Interface of a kind of memory in the KV cache, and the values that it takes and returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.core.ids import BlockId, existing_blocks
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.held_kv import HeldKv


class CachedBlocks(Protocol):
    """Blocks by name: the pool's, or those of another cache as well."""

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockId]: ...

    def is_cached(self, block_hash: BlockHash) -> bool: ...


class PrefixQuery(NamedTuple):
    """A sequence of tokens, the longest cached prefix of which is searched."""

    cached: CachedBlocks
    hashes: Sequence[BlockHash]  # of its full blocks
    continues_at: int | None = None  # the next token to compute, if not the one after the prefix


class NamedBlock(NamedTuple):
    """A block of a prefix, and the place in the block tables that it belongs to."""

    place: int
    name: BlockHash
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks of a prefix. The request does not hold them yet."""

    num_blocks: int  # of tokens
    # By group: a table with an entry per block of tokens, or the snapshot of a recurrent state.
    blocks: tuple[list[BlockId], ...]
    position: int = 0  # of the next token that is computed here
    num_shared_blocks: int = 0  # that all tables have, with or without a snapshot after them

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks of all groups."""
        return list(existing_blocks(self.blocks))


class CacheGroup(Protocol):
    """Memory of some layers of a model: full attention, a window or chunk, or recurrent state."""

    number: int  # index of its blocks in a `PrefixHit`
    is_all_or_nothing: bool  # its blocks of a prefix are of use only together

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the names of the blocks that it may have at the end of this block of tokens."""
        ...

    def longest_prefix(self, query: PrefixQuery, num_blocks: int) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that it can continue."""
        ...

    def find(self, query: PrefixQuery, num_blocks: int) -> list[BlockId]:
        """Return its cached blocks of a prefix that it can continue."""
        ...

    def named_blocks(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> Iterable[NamedBlock]:
        """Return the blocks of `find` with their names, in the order in which they are loaded."""
        ...

    def num_allocated(self, hit: PrefixHit, num_blocks: int) -> int:
        """Return the number of blocks that `allocate` takes from the pool."""
        ...

    def allocate(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> None:
        """Give a request its blocks for `num_blocks` blocks of tokens, those of the hit included.

        The caller has checked that there are enough, and holds the hit for the request.
        """
        ...

    def register_loaded(self, held: HeldKv, blocks: Sequence[NamedBlock]) -> None:
        """Add loaded blocks to the prefix cache."""
        ...

    def num_held(self, held: HeldKv) -> int:
        """Return the number of its blocks that a request holds."""
        ...

    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted unless the request has the blocks that it needs of the group."""
        ...
