"""Arguments of the attention kernels, grouped. A kernel reads the fields of a group by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """Constants of the attention kernels: a kernel is compiled for each value.

    A key is multiplied in two parts. Its front has the size of a value, and is the value if the
    cache is latent.
    """

    num_kv_heads: int
    gqa_group_size: int
    tile_heads: int  # query heads of a KV head in a tile
    head_dim: int
    value_dim: int
    slot_size: int
    block_size: int
    padded_value_dim: int
    padded_rest_dim: int  # 0 if the front is all of the key
    num_rows: int  # of a tile: tokens times query heads
    num_keys: int  # read at a time
    segment_keys: int
    has_softcap: bool
    has_sinks: bool
    is_int8: bool  # the cache
    is_latent: bool  # keys begin with their values
    has_seen_ends: bool  # some tokens see beyond themselves

    @property
    def tile_tokens(self) -> int:
        return self.num_rows // self.tile_heads

    @property
    def head_tiles(self) -> int:
        """Return the tiles of a KV head's query heads."""
        return -(-self.gqa_group_size // self.tile_heads)


class Batch(NamedTuple):
    """Sequences of a pass."""

    block_table: Tensor
    query_starts: Tensor  # and, last, the number of tokens
    context_lens: Tensor
    num_sequences: int
    table_stride: int
    seen_ends: Tensor  # by token: the end of the keys that it sees


class Cache(NamedTuple):
    """KV tensor, and where the layer's keys and values are in a block."""

    kv: Tensor
    block_stride: int
    head_stride: int
    key_place: int
    value_place: int


class Scores(NamedTuple):
    """Numbers that turn products of queries and keys into scores."""

    scale: float
    softcap: float
    window: int
    chunk: int


class Partials(NamedTuple):
    """Sums of single segments in float32."""

    outputs: Tensor  # [tokens, heads, segments, value_dim]
    sums: Tensor  # [tokens, heads, segments, 2]: highest scores, sums of weights
