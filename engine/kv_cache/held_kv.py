"""KV of one request: the blocks that it holds, and what the prefix cache knows of them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import BlockId, RequestId, existing_blocks
from baton.core.kv_hints import BlockHints
from baton.engine.kv_cache.block_hashes import BlockHash, extend_hashes
from baton.engine.plan import BlockIds, StateBlocks


class RecurrentState:
    """Blocks of one request's state. Each pass reads one side and writes the other."""

    __slots__ = ("_num_tokens", "_sides", "num_shared_tokens", "prefix_state")

    def __init__(
        self,
        sides: tuple[BlockIds, BlockIds],
        num_tokens: int,
        prefix_state: BlockIds = (),
        num_shared_tokens: int = 0,
    ) -> None:
        self._sides = sides
        self._num_tokens = num_tokens  # when the first side was current
        # Of the prefix hit: read by the first pass, and held until that is applied.
        self.prefix_state = prefix_state
        self.num_shared_tokens = num_shared_tokens  # whose KV was cached when it was admitted

    @property
    def block_ids(self) -> list[BlockId]:
        return [*self._sides[0], *self._sides[1], *self.prefix_state]

    def sides(self, num_computed_tokens: int) -> tuple[BlockIds, BlockIds]:
        """Return both sides, first the one that holds the state after these tokens.

        Each pass since the last chunk computed one token, so that decoding needs no bookkeeping.
        """
        first, second = self._sides
        is_swapped = (num_computed_tokens - self._num_tokens) % 2
        return (second, first) if is_swapped else (first, second)

    def end_chunk(self, num_computed_tokens: int) -> BlockIds:
        """Swap the sides after a prefill chunk. Returns the blocks that are needed no longer."""
        first, second = self._sides
        self._sides, self._num_tokens = (second, first), num_computed_tokens
        read, self.prefix_state = self.prefix_state, ()
        return read


class HeldKv:
    """Owned by the `KvCache`, which changes it. The scheduler counts the computed tokens."""

    __slots__ = (
        "block_hashes",
        "block_hints",
        "block_tables",
        "is_registering",
        "num_computed_tokens",
        "num_context_tokens",
        "num_registered_blocks",
        "request_id",
        "root_hash",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        root_hash: BlockHash,
        block_hints: BlockHints,
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids  # shared with the request, which appends the output
        self.num_context_tokens = len(token_ids)  # prompt and prior output
        self.root_hash = root_hash
        self.block_hints = block_hints
        self.block_hashes: list[BlockHash] = []  # of the leading full blocks
        self.num_computed_tokens = 0  # leading tokens whose KV is in the blocks
        self.num_registered_blocks = 0  # leading blocks that are in the prefix cache
        self.is_registering = True  # False: the KV predates a reset of the prefix cache
        self.block_tables: tuple[list[BlockId], ...] = ()  # one for each KV group
        self.state: RecurrentState | None = None  # of a model with recurrent layers, with blocks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def extend_hashes(self, block_size: int) -> None:
        """Compute the hashes of the full blocks that have none yet."""
        extend_hashes(self.block_hashes, self.root_hash, self.token_ids, block_size)

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
