"""What the runner tells the other rooms, as values and one Protocol. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.model_folder import GenerationDefaults
from kv_transfer.fence import Fence


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the engine needs to know of the loaded model."""

    folder: Path
    fingerprint: str  # of the configuration and the weights; see WeightFiles.digest
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    dtype: str
    # Prompts longer than this share KV only with prompts of the same length (dynamic rope
    # turns their positions by the length), so their prefix cache needs that length as salt.
    max_shareable_prompt_len: int | None


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The cache as numbers, for those who move its blocks and may not know torch."""

    address: int
    num_bytes: int
    device: str  # cpu or cuda:0
    num_blocks: int
    block_bytes: int
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # float32, bfloat16 or float16

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def layer_bytes(self) -> int:
        """Of one layer inside one block; layers lie in order."""
        return self.block_bytes // self.num_layers


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading the weights has come."""

    loaded_bytes: int
    total_bytes: int


OnLoad = Callable[[LoadProgress], None]


NO_LAYER = -1


class PassHook(Protocol):
    """Called as a forward pass goes on, on the engine's thread."""

    def layer_done(self, layer: int, fence: Fence) -> None:
        """The layer's KV is in the KV tensor once the fence is passed, and may not leave before.

        NO_LAYER: the pass goes on, and none of its layers may leave yet.
        """
        ...

    def pass_done(self) -> None:
        """All layers were announced. It may wait for their fences: `run` does so before it ends."""
        ...
