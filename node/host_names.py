"""Names of the blocks in host memory as routers know them. Pure."""

from __future__ import annotations

from collections import Counter

from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import is_of_first_group, snapshot_end
from baton.kv_transfer.external_kv import HeldChanges


class HostNames:
    """Translates changes of host memory into changes of names that a prefix hit may end with.

    These are the names of the first KV group. With recurrent layers, they are those of the blocks
    at whose end all parts of a snapshot are there.
    """

    def __init__(self, num_snapshot_parts: int) -> None:
        self._num_parts = num_snapshot_parts  # 0: the model has no recurrent layers
        self._num_held: Counter[BlockHash] = Counter()  # parts by block

    def translate(self, changes: HeldChanges) -> HeldChanges:
        removed, added = (
            [BlockHash(name) for name in names] for names in (changes.removed, changes.added)
        )
        if self._num_parts:
            # In this order: a snapshot that loses a part and gains another one is never whole.
            ended = [end for name in removed if (end := self._remove(name)) is not None]
            whole = [end for name in added if (end := self._add(name)) is not None]
            return HeldChanges(added=tuple(whole), removed=tuple(ended))
        return HeldChanges(
            added=tuple(name for name in added if is_of_first_group(name)),
            removed=tuple(name for name in removed if is_of_first_group(name)),
        )

    def _add(self, name: BlockHash) -> BlockHash | None:
        """Count a part. Returns the block at the end of its snapshot if that is whole now."""
        end = snapshot_end(name)
        if end is None:
            return None
        self._num_held[end] += 1
        return end if self._num_held[end] == self._num_parts else None

    def _remove(self, name: BlockHash) -> BlockHash | None:
        """Count a part. Returns the block at the end of its snapshot if that was whole."""
        end = snapshot_end(name)
        if end is None:
            return None
        was_whole = self._num_held[end] == self._num_parts
        self._num_held[end] -= 1
        if not self._num_held[end]:
            del self._num_held[end]
        return end if was_whole else None
