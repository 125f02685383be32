"""Shortage of KV blocks, remembered until it may be over. Pure."""

from __future__ import annotations

from typing import NamedTuple

from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool


class BlockShortage(NamedTuple):
    """State in which there were too few blocks for a waiting request.

    The request is not looked up again until blocks are released, requests change their places or
    its cached prefix gets longer.
    """

    num_releases: int
    num_changes: int
    missing_hash: BlockHash | None  # once it is cached, fewer blocks are needed

    @classmethod
    def of(cls, pool: BlockPool, num_changes: int, missing_hash: BlockHash | None) -> BlockShortage:
        # Counters instead of a callback: a release costs nothing here.
        return cls(pool.num_releases, num_changes, missing_hash)

    def lasts(self, pool: BlockPool, num_changes: int) -> bool:
        """Return whether the request would fare no better than before. Costs no lookup."""
        if (self.num_releases, self.num_changes) != (pool.num_releases, num_changes):
            return False
        return self.missing_hash is None or not pool.is_cached(self.missing_hash)
