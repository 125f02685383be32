"""Values and the pass hook that other packages share with the runner. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.checkpoint.checkpoint import Checkpoint, GenerationDefaults
from baton.core.media import PictureRows
from baton.core.pooling import Pooling, PoolingKind
from baton.engine.kv_cache.groups import CacheLayout
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.layout import KvLayout


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the loaded model that the rest of the engine needs."""

    checkpoint: Checkpoint
    fingerprint: str  # configuration and weights; see Tensors.digest
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    dtype: str
    # Prompts longer than this share KV only with prompts of the same length, because the angles of
    # dynamic RoPE depend on the length. So their length is part of the prefix-cache salt.
    max_shareable_prompt_len: int | None
    hidden_size: int = 0
    pooling: Pooling | None = None  # None: the model embeds nothing
    can_generate: bool = True
    has_decoder: bool = True  # False: the vision tower alone is loaded
    # Rows of the encoding of a picture. None: no tower is loaded.
    picture_rows: PictureRows | None = None
    encoding_row_bytes: int = 0  # of an encoding; 0: the model takes no pictures
    takes_prompt_embeds: bool = False  # instead of pictures
    sees_whole_pictures: bool = False  # a picture's tokens must be computed in one pass
    # Names an option of the kernels that changes the bits of KV, but not its meaning: nodes hand
    # requests over, and find no cached blocks of each other.
    numerics: str = ""
    kernels: str = ""  # that compute it, such as avx512bf16 or torch: others can give other tokens

    @property
    def cache_salt(self) -> str:
        """Return what the bits of cached KV depend on, besides its dtype and its tokens."""
        return f"{self.fingerprint}:{self.numerics}" if self.numerics else self.fingerprint

    @property
    def encodes_pictures(self) -> bool:
        return self.picture_rows is not None

    @property
    def vector_size(self) -> int:
        """Return the numbers of a vector of a pooled text; 0: the model does not pool."""
        if self.pooling is None:
            return 0
        dense = self.pooling.dense
        return self.pooling.num_labels or (dense[-1].num_outputs if dense else self.hidden_size)

    @property
    def has_labels(self) -> bool:
        return self.pooling is not None and self.pooling.num_labels > 0

    @property
    def pools_tokens(self) -> bool:
        return self.pooling is not None and self.pooling.kind is PoolingKind.TOKENS


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Address and shape of the KV cache, for code that moves blocks without torch."""

    address: int
    num_bytes: int
    device: str  # cpu or cuda:0
    num_blocks: int
    block_bytes: int
    blocks: KvLayout
    layout: CacheLayout

    @property
    def num_tokens(self) -> int:
        """Tokens of one request that fit if all groups need all of them."""
        num_blocks = self.layout.max_token_blocks(self.num_blocks, is_caching=False)
        return num_blocks * self.blocks.block_size


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading the weights."""

    loaded_bytes: int
    total_bytes: int


LoadProgressCallback = Callable[[LoadProgress], None]


NO_LAYER = -1


class PassHook(Protocol):
    """Callbacks during a forward pass, on the thread that runs it."""

    def layer_done(self, layer: int, fence: Fence) -> None:
        """Report a layer. Once `fence` is passed its KV is in the KV tensor and can be sent.

        NO_LAYER reports progress only: no layer of this pass can be sent yet.
        """
        ...

    def pass_done(self) -> None:
        """Report that all layers were launched. It can wait for their fences, as `run` does too."""
        ...
