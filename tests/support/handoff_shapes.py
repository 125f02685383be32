"""Prompts of models with several KV groups and a recurrent state, as lists of hand-off blocks.

Both nodes of the hand-off world number their blocks with the engine's transfer order: the decode
node from its prefix hits on, the prefill node from the start. A block's label says what it holds,
so that a block in a wrong place of the order lands with wrong content.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.kv_cache.groups import FULL, KvCacheSpec
from baton.engine.kv_cache.held_kv import HeldKv, RecurrentState, TransferOrder
from tests.support.requests import make_held

BLOCK_SIZE = 2
LABELS_PER_PLACE = 8  # one for each group
STATE_LABEL = 0xF0


@dataclass(frozen=True, slots=True)
class Shape:
    """KV groups and state blocks of a model."""

    specs: tuple[KvCacheSpec, ...] = (FULL,)
    num_state_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        """The blocks of a node that is sometimes short of them."""
        return 8 * len(self.specs) + 2 * self.num_state_blocks

    @property
    def order(self) -> TransferOrder:
        return TransferOrder(self.specs, BLOCK_SIZE)

    def first_block(self, num_tokens: int, num_hits: int) -> int:
        """Return the place in the order of a grant after so many cached blocks per group."""
        return self.order.index(self._held(num_tokens), num_hits)

    def labels(self, num_tokens: int, num_hits: int = 0) -> tuple[int, ...]:
        """Return the labels of the blocks that a hand-off transfers, in order."""
        held, order = self._held(num_tokens), self.order
        blocks = order.blocks(held, num_hits, held.num_blocks)
        return (*blocks, *held.context_state)

    def _held(self, num_tokens: int) -> HeldKv:
        """Return a request whose tables have labels for blocks."""
        held = make_held(range(num_tokens))
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        held.block_tables = tuple(
            [self._label(place, group, num_tokens) for place in range(num_blocks)]
            for group in range(len(self.specs))
        )
        state = tuple(BlockId(STATE_LABEL + part) for part in range(self.num_state_blocks))
        other = tuple(BlockId(label + self.num_state_blocks) for label in state)
        held.state = RecurrentState((state, other), num_tokens)
        return held

    def _label(self, place: int, group: int, num_tokens: int) -> BlockId:
        is_unseen = (place + 1) * BLOCK_SIZE <= self.specs[group].num_unseen(num_tokens)
        return NO_BLOCK if is_unseen else BlockId(place * LABELS_PER_PLACE + group)


def draw_shape(seed: int) -> Shape:
    """Return one group with full attention, or up to four groups and a state."""
    draw = random.Random(f"shape {seed}")
    if draw.random() < 0.5:
        return Shape()
    specs = [
        draw.choice([FULL, KvCacheSpec(window=draw.randint(1, 5)), KvCacheSpec(chunk=3)])
        for _ in range(draw.randint(1, 4))
    ]
    return Shape(tuple(specs), draw.choice([0, 0, 1, 2]))
