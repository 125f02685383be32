"""A kind of memory in the KV cache, and the values that it takes and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    # By group: a table with an entry per block of tokens, or the blocks of a recurrent state.
    blocks: tuple[list[BlockId], ...]
    position: int = 0  # of the next token that is computed here
    num_shared_blocks: int = 0  # that all tables have, with or without a state after them

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks of all groups."""
        return list(existing_blocks(self.blocks))


class PassChunk(NamedTuple):
    """A run of tokens of a request that a pass computes, the last of a prompt or not."""

    held: HeldKv
    start: int  # position of its first token
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class CacheGroup(ABC):
    """Memory of one kind: of layers with full attention, a window or a chunk, or recurrent ones.

    A group implements what its kind of memory needs: methods that are not abstract do nothing.
    Layers of another model with the same tokens, such as one that drafts, are one more group of
    tokens. Another kind, such as embeddings of media, is a class, a field of `CacheLayout` and a
    line of `KvCache`.
    """

    number: int  # index of its blocks in a `PrefixHit`, and part of their names
    label: str  # in statistics
    is_all_or_nothing: bool  # its blocks of a prefix are of use only together
    forgets: bool  # some of its blocks of a prefix are not needed for the tokens after it

    # --- prefix hits --------------------------------------------------------------

    @abstractmethod
    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the names of the blocks that it may have at the end of this block of tokens."""

    @abstractmethod
    def longest_prefix(self, query: PrefixQuery, num_blocks: int) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that it can continue."""

    @abstractmethod
    def find(self, query: PrefixQuery, num_blocks: int) -> list[BlockId]:
        """Return its cached blocks of a prefix that it can continue."""

    @abstractmethod
    def named_blocks(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> Iterable[NamedBlock]:
        """Return the blocks of `find` with their names, in the order in which they are loaded."""

    # --- blocks of a request ------------------------------------------------------

    @abstractmethod
    def num_allocated(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> int:
        """Return the number of blocks that `allocate` takes from the pool."""

    @abstractmethod
    def allocate(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> None:
        """Give a request its blocks for `num_blocks` blocks of tokens, those of the hit included.

        The caller has checked that there are enough, and holds the hit for the request.
        """

    @abstractmethod
    def cached_blocks(self, held: HeldKv) -> Iterable[tuple[int, BlockId]]:
        """Return the blocks that the prefix cache may have of a request, each with its place."""

    def release(self, held: HeldKv) -> Iterable[tuple[int, BlockId]]:
        """Release what is of no use without the request. Returns `cached_blocks`, held once."""
        return self.cached_blocks(held)

    def release_unseen(self, held: HeldKv) -> None:  # noqa: B027
        """Release the blocks that no later token of the request attends to."""

    @abstractmethod
    def num_held(self, held: HeldKv) -> int:
        """Return the number of its blocks that a request holds."""

    # --- the prefix cache ---------------------------------------------------------

    def register(self, held: HeldKv, first: int, end: int) -> None:  # noqa: B027
        """Add the blocks of a table from one place up to another to the prefix cache."""

    @abstractmethod
    def register_loaded(self, held: HeldKv | None, blocks: Sequence[NamedBlock]) -> None:
        """Add loaded blocks to the prefix cache.

        Without `held`, their tokens are not known here. No event names them then: the external
        cache that held them does, and it need not store them.
        """

    def end_chunk(self, held: HeldKv) -> None:  # noqa: B027
        """Note that a pass has computed a prefill chunk of the request."""

    # --- invariants ---------------------------------------------------------------

    @abstractmethod
    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted unless the request has the blocks that it needs of the group."""


class PrefixSearch:
    """Longest prefix that all groups can continue, each with the blocks that it needs."""

    def __init__(self, groups: Sequence[CacheGroup], block_size: int) -> None:
        self._groups = groups
        self._tables = [group for group in groups if not group.is_all_or_nothing]
        self._block_size = block_size
        self._has_one_full_group = len(groups) == 1 and not groups[0].forgets

    def find(
        self, cached: CachedBlocks, hashes: Sequence[BlockHash], continues_at: int | None = None
    ) -> PrefixHit:
        """Return the longest prefix of which each group has the blocks that it needs.

        A group with windows needs those that tokens from `continues_at` attend to, or by default
        those that the tokens after the prefix do. Recurrent layers need their state at the end of
        the prefix, unless another node continues it.
        """
        num_shared = 0
        if self._has_one_full_group:  # as in most models
            found = cached.find(hashes)
            num_blocks, blocks = len(found), [found]
        else:
            query = PrefixQuery(cached, hashes, continues_at)
            num_shared = num_blocks = self._longest(self._tables, query, len(hashes))
            if len(self._groups) > len(self._tables):
                num_blocks = self._longest(self._groups, query, num_shared)
            blocks = [group.find(query, num_blocks) for group in self._groups]
            # Without blocks, the prefix is not cached: the next token just does not attend to it.
            if next(existing_blocks(blocks), None) is None:
                num_blocks, blocks = 0, [[] for _ in self._groups]
        position = num_blocks * self._block_size if continues_at is None else continues_at
        return PrefixHit(num_blocks, tuple(blocks), position, num_shared)

    def _longest(self, groups: Sequence[CacheGroup], query: PrefixQuery, num_blocks: int) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that these groups can continue.

        What one group shortens, another one may have to shorten further, such as to an earlier
        state, and the first one after that: so all are asked until nothing changes.
        """
        num_before = None
        while num_blocks != num_before:
            num_before = num_blocks
            for group in groups:
                num_blocks = group.longest_prefix(query, num_blocks)
        return num_blocks
