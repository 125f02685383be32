"""Statistics of the groups of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.ids import NO_BLOCK
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import group_of
from baton.engine.kv_cache.prefix_hit import PrefixHit


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one KV group, or of states and their snapshots."""

    num_held: int  # by requests; a shared block counts for each
    total_hits: int  # blocks of prefix hits
    total_evictions: int  # blocks removed from the prefix cache


class GroupCounters:
    """Prefix hits and evictions by group. Names of no KV group are those of the last one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._hits = [0] * len(self.names)
        self._evictions = [0] * len(self.names)

    def count_hit(self, hit: PrefixHit) -> None:
        for group, blocks in enumerate(hit.blocks):
            self._hits[group] += len(blocks) - blocks.count(NO_BLOCK)

    def count_evicted(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            group = group_of(name)
            self._evictions[-1 if group is None else group] += 1

    def stats(self, num_held: Sequence[int]) -> dict[str, GroupStats]:
        """Return the statistics by name, given the blocks that requests hold of each group."""
        counts = zip(num_held, self._hits, self._evictions, strict=True)
        return dict(zip(self.names, (GroupStats(*each) for each in counts), strict=True))
