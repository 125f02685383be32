"""Statistics of the KV groups of a model, and of its recurrent states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.ids import NO_BLOCK
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.prefix_search import PrefixHit, group_of


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one KV group, or of recurrent states and their snapshots."""

    num_held: int  # by requests; a shared block counts for each
    total_hits: int  # blocks of prefix hits
    total_evictions: int  # blocks removed from the prefix cache


class GroupCounters:
    """Prefix hits and evictions by KV group. The last group is that of recurrent states."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._hits = [0] * len(self.names)
        self._evictions = [0] * len(self.names)

    def count_hit(self, hit: PrefixHit) -> None:
        for group, table in enumerate(hit.block_tables):
            self._hits[group] += len(table) - table.count(NO_BLOCK)
        if hit.snapshot:
            self._hits[-1] += len(hit.snapshot)

    def count_evicted(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            group = group_of(name)
            self._evictions[-1 if group is None else group] += 1

    def stats(self, num_held: Sequence[int]) -> dict[str, GroupStats]:
        """Return the statistics by name, given the blocks that requests hold of each group."""
        counts = zip(num_held, self._hits, self._evictions, strict=True)
        return dict(zip(self.names, (GroupStats(*each) for each in counts), strict=True))
