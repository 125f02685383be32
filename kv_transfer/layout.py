"""Layout of KV blocks as a value, and the map between the blocks of two layouts. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from baton.core.ids import BlockId

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvPacking(Enum):
    """Arrangement of the numbers of a block."""

    PLAIN = "plain"  # [layers, tensors, kv_heads, tokens, numbers]
    INT8 = "int8"  # likewise; the numbers of a token and KV head are followed by their scale
    FP8 = "fp8"  # likewise, as float8_e4m3fn; layers have the scales of the model
    # Blocks of vLLM, [layers, kv_heads, ..]. On GPUs a token's key is followed by its value.
    VLLM = "vllm"
    VLLM_VEC = "vec"  # keys [dim, tokens], then values [tokens, dim]; CPUs without AMX
    # Keys and then values in pairs of numbers, 16 columns each; CPUs with AMX, and bfloat16 only.
    VLLM_AMX = "amx"


# Packings with one byte for a number: the bytes of scale after those of a token and KV head.
SCALE_BYTES = {KvPacking.INT8: 2, KvPacking.FP8: 0}


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Layers that share a block table, by their places in a block; or a recurrent state."""

    layers: tuple[int, ...] = ()
    window: int = 0  # tokens that a token attends to, itself included; 0: no window
    chunk: int = 0  # tokens attend only within their own chunk of this size; 0: no chunks
    state: str = ""  # packing of a recurrent state into its blocks
    # Heads of the layers, if the model has layers of unlike sizes; 0: those of the layout.
    num_kv_heads: int = 0
    head_dim: int = 0
    layer_places: int = 1  # that a layer takes

    @property
    def keeps_all_tokens(self) -> bool:
        return not (self.window or self.chunk or self.state)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Meaning of the bytes of a block: equal on two sides that exchange blocks as they are."""

    dtype: str  # float32, bfloat16 or float16: that the model computes in
    block_size: int = 0  # tokens
    num_layers: int = 0  # places for layers in a block
    # Of each place. Layers of unlike sizes have heads of their own: see `MemoryKind`.
    num_kv_heads: int = 0
    head_dim: int = 0
    num_tensors: int = 2  # per layer: keys and values, or 1 if the keys contain the values
    packing: KvPacking = KvPacking.PLAIN
    kinds: tuple[MemoryKind, ...] = ()  # of memory that blocks belong to, one at a time
    first_head: int = 0  # of the range that this memory has of each layer

    @property
    def cache_dtype(self) -> str:
        """Return the stored dtype, for people."""
        is_plain = self.packing not in SCALE_BYTES
        return self.dtype if is_plain else f"{self.packing.value}/{self.dtype}"

    @property
    def block_bytes(self) -> int:
        """Return the size of a block; 0 for an unknown dtype."""
        return self.num_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the size of one place in a block."""
        slot_bytes = NUMBER_BYTES.get(self.dtype, 0) * self.head_dim
        if self.packing in SCALE_BYTES:
            slot_bytes = self.head_dim + SCALE_BYTES[self.packing]
        return self.num_tensors * self.num_kv_heads * self.block_size * slot_bytes

    @property
    def is_uniform(self) -> bool:
        """Return whether all blocks are of one kind of memory, which keeps all tokens."""
        return len(self.kinds) == 1 and self.kinds[0].keeps_all_tokens

    @property
    def has_plain_blocks(self) -> bool:
        """Return whether all blocks are keys and values of layers with the same heads."""
        return not any(kind.head_dim or kind.state for kind in self.kinds)


def is_convertible(source: KvLayout, target: KvLayout) -> bool:
    """Return whether a peer's blocks of `source` can be converted into different ones of `target`.

    KV becomes int8 or FP8, but never again what it was. Block sizes can differ if all layers attend
    to all tokens: otherwise the two sides would not agree on the blocks that are needed. Only then
    it becomes FP8, too: a place of other blocks can belong to several layers, whose scales differ.
    And only then one side can have the layers of a draft head, which follow those of the model.
    Blocks of unlike layers and of recurrent states are not converted.
    """
    are_plain = source.has_plain_blocks and target.has_plain_blocks
    is_packed = are_plain and source.packing in (KvPacking.PLAIN, target.packing)
    are_scaled = target.packing in (source.packing, KvPacking.INT8) or target.is_uniform
    are_sized = source.block_size == target.block_size or target.is_uniform
    unpacked = replace(source, packing=target.packing, block_size=target.block_size)
    if _begin_alike(source, target):
        unpacked = replace(unpacked, num_layers=target.num_layers, kinds=target.kinds)
    is_possible = is_packed and are_scaled and are_sized
    return source != target and is_possible and unpacked == target


def _begin_alike(one: KvLayout, other: KvLayout) -> bool:
    """Return whether both have the same first layers, and one may have more after these."""
    fewer, more = sorted((one, other), key=lambda each: each.num_layers)
    if not (fewer.is_uniform and more.is_uniform):
        return False
    return more.kinds[0].layers[: fewer.num_layers] == fewer.kinds[0].layers


@dataclass(frozen=True, slots=True)
class LayoutRun:
    """Consecutive blocks of a source, and the target's blocks that they fill."""

    source: range  # places in the sequence, in blocks of the source
    first_token: int  # in the first of them, of the first block to fill
    target: range  # indices of the places to fill


NO_RUN = LayoutRun(range(0), 0, range(0))


def layout_map(
    source: KvLayout,
    target: KvLayout,
    places: Sequence[int],
    *,
    num_tokens: int = sys.maxsize,
    max_blocks: int = sys.maxsize,
) -> list[LayoutRun]:
    """Return the blocks of the source that fill these places of the target, ascending, as runs.

    `num_tokens`: that the source has. A run has at most `max_blocks` blocks of the source, or as
    many as one place needs.
    """
    size, source_size = target.block_size, source.block_size
    if size == source_size:
        num_tokens = sys.maxsize  # places are those of blocks of any kind of memory
    runs: list[LayoutRun] = []
    first = 0
    while first < len(places):
        begin = places[first] * size // source_size
        end = _end_of_run(places, first, size, (begin + max_blocks) * source_size)
        last_token = min((places[end - 1] + 1) * size, num_tokens)
        skipped = places[first] * size - begin * source_size
        blocks = range(begin, -(-last_token // source_size))
        runs.append(LayoutRun(blocks, skipped, range(first, end)))
        first = end
    return runs


def _end_of_run(places: Sequence[int], first: int, size: int, max_tokens: int) -> int:
    """Return the index after the last place, from `first` on, that is consecutive and fits."""
    end = first + 1
    while end < len(places) and places[end] == places[end - 1] + 1:
        if (places[end] + 1) * size > max_tokens:
            break
        end += 1
    return end


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Blocks of a peer in staging memory, to convert into blocks of this node."""

    source: KvLayout
    target: KvLayout
    offset: int  # of the first in the staging memory
    num_blocks: int
    first_token: int  # in the first of them, of the first block to fill
    block_ids: tuple[BlockId, ...]  # to fill
