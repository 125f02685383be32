"""Packing of the recurrent state of a request into blocks of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.core.errors import InvalidConfig
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.attention.kv_tensor import KvShape
from baton.engine.runner.model.config import ModelConfig, RecurrentConfig

MATRIX_ITEMSIZE = 4  # float32


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of all recurrent layers of a request as rows of equal size.

    A row is one of a head's matrix. For each layer the rows of its matrices come first, then the
    last inputs of its convolution, cut into rows. Row r is in block r // rows_per_block of the
    state's blocks, which need not be neighbours.
    """

    config: RecurrentConfig
    num_layers: int  # recurrent ones
    dtype: str
    conv_itemsize: int
    block_bytes: int

    @property
    def conv_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def row_bytes(self) -> int:
        return MATRIX_ITEMSIZE * self.config.value_dim

    @property
    def rows_per_block(self) -> int:
        return self.block_bytes // self.row_bytes

    @property
    def matrix_rows(self) -> int:
        """Return the rows of a layer's matrices."""
        return self.config.num_value_heads * self.config.key_dim

    @property
    def conv_rows(self) -> int:
        """Return the rows of the inputs that a layer's convolution needs again."""
        numbers = (self.config.conv_size - 1) * self.config.num_channels
        return -(-numbers * self.conv_itemsize // self.row_bytes)

    @property
    def layer_rows(self) -> int:
        return self.matrix_rows + self.conv_rows

    @property
    def num_blocks(self) -> int:
        return -(-self.num_layers * self.layer_rows // self.rows_per_block)

    def __str__(self) -> str:
        config = self.config
        matrices = f"{config.num_value_heads}x{config.key_dim}x{config.value_dim} float32"
        inputs = f"{config.conv_size - 1}x{config.num_channels} {self.dtype}"
        return f"state: {self.num_layers} layers of {matrices} and {inputs}"


def state_shape(model: ModelConfig, kv: KvShape, dtype: torch.dtype) -> StateShape | None:
    """Return the packing of a state of a model that computes in `dtype`, or None if it has none.

    Raises InvalidConfig if a block is smaller than a row, or does not consist of numbers of a row.
    """
    num_layers = len(model.recurrent_layers)
    if model.recurrent is None or not num_layers:
        return None
    name = str(dtype).removeprefix("torch.")
    shape = StateShape(model.recurrent, num_layers, name, dtype.itemsize, kv.block_bytes)
    if kv.block_bytes % MATRIX_ITEMSIZE:
        raise InvalidConfig(
            f"block_size {kv.block_size}: a block of {kv.block_bytes} bytes does not hold whole "
            "numbers of a recurrent state: use a multiple of 4 tokens"
        )
    if not shape.rows_per_block:
        token_bytes = kv.block_bytes // kv.block_size
        raise InvalidConfig(
            f"block_size {kv.block_size}: a block of {kv.block_bytes} bytes is smaller than a row"
            f" of this model's recurrent state ({shape.row_bytes} bytes): use at least"
            f" {-(-shape.row_bytes // token_bytes)} tokens"
        )
    return shape


def cache_layout(model: ModelConfig, state: StateShape | None, num_drafted: int = 0) -> CacheLayout:
    """Return the memory that a request of this model takes, with so many drafts at once."""
    if state is None:
        return CacheLayout(model.kv_groups())
    return CacheLayout(model.kv_groups(), state.num_blocks, str(state), num_drafted)
