"""Arguments of the kernels of recurrent layers, grouped. A kernel reads the fields by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateSizes(NamedTuple):
    """Constants of the kernels: a kernel is compiled for each value.

    Heads are those of queries, of keys and of values. Their dimensions are channels.
    """

    is_delta: bool  # the gated delta rule, otherwise Mamba2
    strength_scale: float  # of the delta rule
    num_key_heads: int
    num_value_heads: int
    num_heads: int
    num_channels: int
    key_dim: int
    value_dim: int
    num_kept: int  # inputs of the tokens before, which the convolution of a token reads
    num_kept_rows: int  # of a state, that hold them
    row_size: int  # numbers of one of these rows
    rows_per_block: int
    num_columns: int  # of a head's state, that a program of the recurrence computes
    padded_dim: int  # of keys or values, the larger ones
    padded_key_dim: int
    padded_taps: int


class ConvWeights(NamedTuple):
    """Weights of a layer up to the recurrence. Kernels of the delta rule read no `conv_bias`."""

    conv: Tensor  # [taps, channels]
    conv_bias: Tensor
    bias: Tensor  # of decays or steps
    decay_rate: Tensor


class Strides(NamedTuple):
    """Numbers from one row to the next."""

    projected: int
    gates: int
    table: int
    blocks: int
