"""KV of one request: the blocks that it holds, and what the prefix cache knows of them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import BlockId, RequestId, existing_blocks
from baton.core.kv_hints import BlockHints
from baton.engine.kv_cache.block_hashes import BlockHash, extend_hashes
from baton.engine.kv_cache.recurrent_state import RecurrentState
from baton.engine.plan import StateBlocks


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
        return None if self.state is None else self.state.blocks(self.num_computed_tokens)

    @property
    def block_ids(self) -> list[BlockId]:
        """All blocks, of all groups and of the recurrent state."""
        block_ids = list(existing_blocks(self.block_tables))
        return block_ids if self.state is None else [*block_ids, *self.state.block_ids]
