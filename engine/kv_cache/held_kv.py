"""KV of one request: the blocks that it holds, and what the prefix cache knows of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.ids import (
    NO_ADAPTER,
    AdapterRef,
    BlockId,
    RequestId,
    existing_blocks,
)
from baton.core.kv_hints import BlockHints
from baton.core.media import MediaSegment
from baton.engine.kv_cache.block_hashes import BlockHash, extend_hashes
from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.plan import BlockIds, StateBlocks


@dataclass(slots=True, eq=False)
class RecurrentState:
    """Blocks of one request's state. Each pass reads one side and writes the next one."""

    all_sides: tuple[BlockIds, ...]
    num_tokens: int  # when the first side was current
    prefix_state: BlockIds = ()  # read by the first pass, and held until that is applied
    num_shared_tokens: int = 0  # whose KV was cached when the request was admitted

    @property
    def block_ids(self) -> list[BlockId]:
        return [*itertools.chain(*self.all_sides), *self.prefix_state]

    def sides(self, num_computed_tokens: int) -> tuple[BlockIds, ...]:
        """Return the sides in turn, first the one that holds the state after these tokens.

        Since the last chunk, each token took the next side, so that decoding needs no bookkeeping.
        """
        turn = (num_computed_tokens - self.num_tokens) % len(self.all_sides)
        return (*self.all_sides[turn:], *self.all_sides[:turn])

    def end_chunk(self, num_computed_tokens: int) -> BlockIds:
        """Take the next side after a prefill chunk. Returns blocks that are needed no longer."""
        first, *others = self.all_sides
        self.all_sides, self.num_tokens = (*others, first), num_computed_tokens
        read, self.prefix_state = self.prefix_state, ()
        return read


@dataclass(slots=True, eq=False)
class HeldKv:
    """Owned by the `KvCache`, which changes it. The scheduler counts the computed tokens."""

    request_id: RequestId
    token_ids: Sequence[int]  # shared with the request, which appends the output
    root_hash: BlockHash
    block_hints: BlockHints
    media: tuple[MediaSegment, ...] = ()  # in the prompt
    adapter: AdapterRef = NO_ADAPTER  # that computes it
    num_context_tokens: int = field(init=False)  # prompt and prior output
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the leading full blocks
    num_computed_tokens: int = 0  # leading tokens whose KV is in the blocks
    num_registered_blocks: int = 0  # leading blocks that are in the prefix cache
    is_registering: bool = True  # False: the KV predates a reset of the prefix cache
    block_tables: tuple[list[BlockId], ...] = ()  # one for each KV group
    state: RecurrentState | None = None  # of a model with recurrent layers, with blocks

    def __post_init__(self) -> None:
        self.num_context_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def extend_hashes(self, block_size: int) -> None:
        """Compute the hashes of the full blocks that have none yet."""
        extend_hashes(self.block_hashes, self.root_hash, self.token_ids, block_size, self.media)

    @property
    def num_blocks(self) -> int:
        """The length of each block table."""
        return len(self.block_tables[0]) if self.block_tables else 0

    @property
    def state_blocks(self) -> StateBlocks | None:
        """The blocks of the recurrent state that the next pass reads and writes."""
        state = self.state
        if state is None:
            return None
        return StateBlocks(state.sides(self.num_computed_tokens), state.prefix_state)

    @property
    def context_state(self) -> BlockIds:
        """The blocks of the recurrent state after the context."""
        return () if self.state is None else self.state.sides(self.num_context_tokens)[0]

    @property
    def block_ids(self) -> list[BlockId]:
        """All blocks, of all groups and of the recurrent state."""
        block_ids = list(existing_blocks(self.block_tables))
        return block_ids if self.state is None else [*block_ids, *self.state.block_ids]


class TransferOrder:
    """Order in which a hand-off transfers the blocks of all KV groups and of the recurrent state.

    Both nodes derive it from the number of tokens alone: block after block of the sequence, and for
    each the groups in turn, without the blocks that no token after the prompt attends to. The state
    comes last. What the decode node lacks is always the rest of this order, so one number says
    where a grant begins.
    """

    def __init__(self, specs: Sequence[KvCacheSpec], block_size: int) -> None:
        self._specs = tuple(specs)
        self._block_size = block_size
        self._forgets = any(spec.forgets for spec in specs)

    def index(self, held: HeldKv, num_blocks: int) -> int:
        """Return how many blocks precede those after the first `num_blocks` of each table."""
        return sum(max(0, num_blocks - first) for first in self._first_seen(held))

    def blocks(self, held: HeldKv, first: int, end: int) -> list[BlockId]:
        """Return the blocks of the places from `first` to `end` of each table, in order."""
        if len(self._specs) == 1 and not self._forgets:
            return held.block_tables[0][first:end]
        tables = list(zip(held.block_tables, self._first_seen(held), strict=True))
        return [
            table[place]
            for place in range(first, end)
            for table, first_seen in tables
            if place >= first_seen
        ]

    def num_whole_places(self, num_blocks: int) -> int:
        """Return how many places the first blocks of a transfer fill in all tables.

        With windows or chunks this is none: the blocks that tokens in between attend to are not
        transferred.
        """
        return 0 if self._forgets else num_blocks // len(self._specs)

    def _first_seen(self, held: HeldKv) -> list[int]:
        position = held.num_context_tokens
        return [spec.num_unseen(position) // self._block_size for spec in self._specs]
