"""Size, block size and groups of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import InvalidConfig, require_setting
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.engine.kv_cache.groups import CacheLayout


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the KV cache."""

    num_blocks: int
    block_size: int = 16
    layout: CacheLayout = CacheLayout()
    enable_prefix_caching: bool = True
    # Identifies everything the KV of given tokens depends on: weights, dtype, layout.
    model_salt: str = ""
    # Longer prompts share blocks only with prompts of the same length, for models whose KV depends
    # on the prompt length (dynamic rope). None: no limit.
    max_shareable_prompt_len: int | None = None
    collect_events: bool = False  # if set, `take_events` must be called regularly
    collect_token_ids: bool = False  # in these events

    def __post_init__(self) -> None:
        has_enough = self.num_blocks >= 1 or self.layout.is_empty
        require_setting("num_blocks", self.num_blocks, has_enough, "at least 1")
        require_setting("block_size", self.block_size, self.block_size >= 1, "at least 1")
        num_groups, num_for_state = len(self.layout.groups), self._max_state_blocks
        if num_for_state and self.max_blocks_per_group < 1:
            raise InvalidConfig(
                f"num_blocks is {self.num_blocks}; it must be at least "
                f"{num_for_state + num_groups}: {num_for_state} for the recurrent state of "
                f"one request, and {num_groups} for its tokens. Start the node with a larger "
                "--kv-cache-memory"
            )

    @property
    def max_blocks_per_group(self) -> int:
        """The blocks of tokens that one request can have in each group."""
        return self.layout.max_token_blocks(self.num_blocks, is_caching=self.enable_prefix_caching)

    def describe_blocks(self, num_token_blocks: int) -> str:
        """Describe the blocks of a request with so many blocks of tokens in each group."""
        num_blocks = self.layout.num_blocks(num_token_blocks, is_caching=self.enable_prefix_caching)
        state = f" ({self._max_state_blocks} of them for the recurrent state)"
        return f"{num_blocks} KV blocks{state if self._max_state_blocks else ''}"

    @property
    def naming(self) -> PrefixNaming:
        return PrefixNaming(
            self.block_size,
            self.model_salt,
            max_shareable_prompt_len=self.max_shareable_prompt_len,
            needs_snapshot=self.layout.has_state,
        )

    @property
    def _max_state_blocks(self) -> int:
        return self.layout.max_state_blocks(is_caching=self.enable_prefix_caching)
