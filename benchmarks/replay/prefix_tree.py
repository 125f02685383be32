"""Blocks of all prompts and answers so far: what an infinite cache would hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Block = tuple[int, tuple[int, ...]]  # the preceding block and the tokens
Holders = frozenset[str]
NO_HOLDERS: Holders = frozenset()
ROOT = -1


@dataclass(slots=True)
class PrefixTree:
    """Tree of whole blocks, and the nodes that have computed each of them."""

    block_size: int
    _id_by_block: dict[Block, int] = field(default_factory=dict)
    _holders: list[Holders] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    def find(self, token_ids: Sequence[int]) -> list[Holders]:
        """Return the holders of each leading block that was added before.

        The last token of a prompt is always computed, so a block that ends with it is not found.
        """
        found = []
        parent = ROOT
        for block in self._blocks(token_ids[:-1]):
            block_id = self._id_by_block.get((parent, block))
            if block_id is None:
                break
            found.append(self._holders[block_id])
            parent = block_id
        return found

    def add(self, token_ids: Sequence[int], holders: Holders = NO_HOLDERS) -> None:
        """Add the whole blocks of a sequence, and the nodes that have computed them."""
        parent = ROOT
        for block in self._blocks(token_ids):
            parent = self._id_by_block.setdefault((parent, block), len(self._holders))
            if parent == len(self._holders):
                self._holders.append(holders)
            elif not holders <= self._holders[parent]:
                self._holders[parent] |= holders

    def _blocks(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            yield tuple(token_ids[start : start + size])
