"""KV cache tensor of all blocks, and its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.kv_cache.groups import CacheLayout, KvGroup, KvHeads, places_per_block
from baton.engine.runner.attention.byte_kv import packing_of, scale_bytes
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model_info import KvMemory
from baton.kv_transfer.layout import KvLayout, KvPacking


@dataclass(frozen=True, slots=True)
class KvShape:
    """Block-major: [num_blocks, num_places, num_tensors, kv_heads, block_size, head_dim].

    A block belongs to one KV group at a time. Its keys and values of all layers are contiguous. A
    latent cache has one tensor per layer: the leading numbers of a key are its value. As int8,
    head_dim numbers are followed by the bytes of their scale.

    With layers of unlike sizes a place has one head, which is as large as needed; a layer has its
    keys and values, in their own shape, at the beginning of its places: see `view_layer`.
    """

    num_places: int  # for layers
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype  # see `byte_kv`
    num_tensors: int = 2  # per layer

    @classmethod
    def of(cls, model: ModelConfig, block_size: int, dtype: torch.dtype) -> KvShape:
        groups = model.kv_groups()
        num_heads, head_dim = model.num_kv_heads, model.head_dim
        if any(group.spec.heads for group in groups):
            num_heads, head_dim = 1, _place_dim(groups, dtype)
        sizes = num_heads, block_size, head_dim
        return cls(places_per_block(groups), *sizes, dtype, model.num_kv_tensors)

    @property
    def block_bytes(self) -> int:
        return math.prod(self._per_block) * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            shape = (num_blocks, *self._per_block)
            return torch.zeros(shape, dtype=self.dtype, device=device)
        return self.over(huge_page_memory(num_blocks * self.block_bytes))

    def over(self, memory: mmap) -> Tensor:
        """Return the tensor of the blocks that fit into zeroed memory."""
        return torch.frombuffer(memory, dtype=self.dtype).view(-1, *self._per_block)

    @property
    def _per_block(self) -> tuple[int, ...]:
        heads = self.num_kv_heads, self.block_size, self.head_dim + scale_bytes(self.dtype)
        return (self.num_places, self.num_tensors, *heads)


def _place_dim(groups: Sequence[KvGroup], dtype: torch.dtype) -> int:
    """Return the numbers of a token in a place, without those of one scale."""
    scale = scale_bytes(dtype)
    sizes = [
        -(-group.spec.heads.num * (group.spec.heads.dim + scale) // group.layer_places)
        for group in groups
        if group.spec.heads is not None
    ]
    return -(-max(sizes) // 2) * 2 - scale  # scales are aligned


def view_layer(kv: Tensor, place: int, heads: KvHeads | None) -> Tensor:
    """Return the keys and values of a layer, [blocks, tensors, kv_heads, block_size, slot]."""
    if heads is None:
        return kv[:, place]
    num_tensors, block_size = kv.shape[2], kv.shape[4]
    shape = num_tensors, heads.num, block_size, heads.dim + scale_bytes(kv.dtype)
    own = kv.flatten(1).narrow(1, place * kv.stride(1), math.prod(shape))
    return own.view(len(kv), *shape)


def describe(kv: Tensor, layout: CacheLayout, dtype: str = "bfloat16") -> KvMemory:
    """Describe a KV tensor of a model that computes in `dtype`."""
    num_blocks, num_places, num_tensors, num_kv_heads, block_size, slot_size = kv.shape
    num_bytes, packing = kv.numel() * kv.element_size(), packing_of(kv.dtype)
    return KvMemory(
        address=kv.data_ptr(),
        num_bytes=num_bytes,
        device=str(kv.device),
        num_blocks=num_blocks,
        block_bytes=num_bytes // num_blocks,
        blocks=KvLayout(
            str(kv.dtype).removeprefix("torch.") if packing is KvPacking.PLAIN else dtype,
            block_size,
            num_places,
            num_kv_heads,
            head_dim=slot_size - scale_bytes(kv.dtype),
            num_tensors=num_tensors,
            packing=packing,
            kinds=layout.kinds,
        ),
        layout=layout,
    )


def num_blocks_within(budget_bytes: int, layout: CacheLayout, block_bytes: int) -> int:
    """Return the number of whole blocks that fit into the budget: enough for a short request."""
    num_needed = layout.num_blocks(1, is_caching=False)
    num_blocks = budget_bytes // block_bytes
    if num_blocks < num_needed:
        state = " and the recurrent state of a request" if layout.has_state else ""
        raise InvalidConfig(
            f"the KV cache budget of {budget_bytes} bytes holds no block of tokens{state}: "
            f"one takes {num_needed * block_bytes} bytes"
        )
    return num_blocks
