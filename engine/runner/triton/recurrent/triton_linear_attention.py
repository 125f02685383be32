"""Recurrent layers in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.model.mixers import LinearAttentionPass
from baton.engine.runner.model.recurrent.gated_delta import NORM_EPSILON, GatedDelta
from baton.engine.runner.model.recurrent.mamba2 import Mamba2
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.state.linear_attention import LinearAttention, TorchLinearAttention
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.state.state_tables import StateLayout
from baton.engine.runner.triton.launching import launch, row_contiguous
from baton.engine.runner.triton.recurrent.convolution_kernels import convolve_kernel
from baton.engine.runner.triton.recurrent.recurrent_kernels import gated_norm_kernel, recur_kernel

STATE_NUMBERS = 1024  # of a head's state, in the registers of a warp
NORM_NUMBERS = 1024  # of a group, that a warp of the norm computes
TritonRule = GatedDelta | Mamba2


def make_linear_attention(kv: Tensor, shape: StateShape) -> LinearAttention:
    """Return the kernels of the rule, or torch's operations if Triton has none."""
    if not RULES[shape.config.rule].has_triton_kernels:
        return TorchLinearAttention(kv, shape)
    return TritonLinearAttention(kv, shape)


class TritonLinearAttention:
    """Implements `LinearAttention`. A token's output depends only on its own sequence."""

    def __init__(self, kv: Tensor, shape: StateShape) -> None:
        # As the inputs of convolutions, whatever keys and values are.
        self._blocks = kv.view(len(kv), -1).view(shape.conv_dtype)
        self._shape = shape

    def begin(self, layout: StateLayout, inputs: StepInputs = SHARED_INPUTS) -> LinearAttentionPass:
        num_runs = len(layout.num_tokens)
        first_runs = np.append(layout.first_runs, num_runs)
        sequence_by_run = np.repeat(np.arange(len(layout.first_runs)), np.diff(first_runs))
        sequence_by_token = np.repeat(sequence_by_run, layout.num_tokens)
        arrays = [
            np.concatenate((sequence_by_token, sequence_by_run)),
            first_runs,
            layout.first_tokens,
            layout.num_tokens,
        ]
        blocks = layout.reads, layout.writes
        runs = _Runs(
            *[inputs.put(array) for array in arrays],
            *[inputs.put(array, np.int32) for array in blocks],
        )
        return TritonStatePass(self._blocks, self._shape, runs)


class _Runs(NamedTuple):
    """Arrays of a state layout on the device."""

    sequences: Tensor  # of each token, then of each run
    first_runs: Tensor  # of each sequence, then the number of runs
    first_tokens: Tensor
    num_tokens: Tensor
    reads: Tensor  # in 32 bits, as the next one
    writes: Tensor


class _Vectors(NamedTuple):
    """Vectors of a layer. The kernels of the delta rule do not read the last two."""

    bias: Tensor  # of decays or steps
    conv_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True)
class TritonStatePass:
    """Implements `LinearAttentionPass`."""

    blocks: Tensor  # [blocks, numbers]
    shape: StateShape
    runs: _Runs

    def mix(self, layer: int, weights: RecurrentRule, projected: Tensor, gates: Tensor) -> Tensor:
        assert isinstance(weights, TritonRule)  # see make_linear_attention
        projected = row_contiguous(projected)
        mixed, factors = self._convolve(layer, weights, projected, row_contiguous(gates))
        read = self._recur(layer, weights, mixed, factors)
        return self._finish(weights, read, projected[:, self.shape.config.num_channels :])

    def _convolve(
        self, layer: int, weights: TritonRule, projected: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values of each token, and two factors of each value head."""
        shape, config, runs = self.shape, self.shape.config, self.runs
        num_tokens, own = len(projected), _vectors(weights)
        mixed = projected.new_empty(num_tokens, config.num_channels, dtype=torch.float32)
        factors = mixed.new_empty(num_tokens, config.num_value_heads, 2)
        launch(
            convolve_kernel,
            (len(runs.sequences), 2 * config.num_key_heads + config.num_value_heads),
            mixed,
            factors,
            projected,
            gates,
            self.blocks,
            ConvWeights(weights.conv, own.conv_bias, own.bias, weights.decay_rate),
            *runs,
            num_tokens,
            layer * shape.layer_rows + shape.matrix_rows,
            Strides(
                projected.stride(0), gates.stride(0), runs.reads.stride(0), self.blocks.stride(0)
            ),
            NORM_EPSILON,
            config.key_dim**-0.5,
            sizes=self._sizes(weights),
            num_warps=1,
        )
        return mixed, factors

    def _recur(self, layer: int, weights: TritonRule, mixed: Tensor, factors: Tensor) -> Tensor:
        """Return what the tokens read from the state, [tokens, values], and write the states."""
        shape, config, runs = self.shape, self.shape.config, self.runs
        matrices = self.blocks.view(torch.float32)
        read = mixed.new_empty(len(mixed), config.num_values)
        sizes = self._sizes(weights)
        grid = (
            triton.cdiv(config.value_dim, sizes.num_columns),
            config.num_value_heads,
            len(runs.first_runs) - 1,
        )
        launch(
            recur_kernel,
            grid,
            read,
            matrices,
            mixed,
            factors,
            _vectors(weights).skip,
            *runs[1:],
            layer * shape.layer_rows,
            runs.reads.stride(0),
            matrices.stride(0),
            sizes=sizes,
            num_warps=1,
        )
        return read

    def _finish(self, weights: TritonRule, read: Tensor, gates: Tensor) -> Tensor:
        """Return the norm of each head (delta rule) or of each group of heads, with its gates."""
        config, is_delta = self.shape.config, isinstance(weights, GatedDelta)
        num_groups = config.num_value_heads if is_delta else config.num_key_heads
        size = config.num_values // num_groups
        output = torch.empty_like(read, dtype=gates.dtype)
        norm = weights.norm
        padded_size = triton.next_power_of_2(size)
        launch(
            gated_norm_kernel,
            (len(read), num_groups),
            output,
            read,
            gates,
            read if norm is None else norm.weight,  # which is not read
            gates.stride(0),
            0 if is_delta else size,
            size,
            0.0 if norm is None else norm.epsilon,
            is_delta=is_delta,
            has_norm=norm is not None,
            padded_size=padded_size,
            num_warps=min(max(padded_size // NORM_NUMBERS, 1), 8),
        )
        return output

    def _sizes(self, weights: TritonRule) -> StateSizes:
        config, shape = self.shape.config, self.shape
        padded_key_dim: int = triton.next_power_of_2(config.key_dim)
        padded_value_dim: int = triton.next_power_of_2(config.value_dim)
        return StateSizes(
            is_delta=isinstance(weights, GatedDelta),
            strength_scale=config.strength_scale,
            num_key_heads=config.num_key_heads,
            num_value_heads=config.num_value_heads,
            num_heads=2 * config.num_key_heads + config.num_value_heads,
            num_channels=config.num_channels,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            num_kept=config.conv_size - 1,
            num_kept_rows=shape.conv_rows,
            row_size=shape.row_bytes // self.blocks.itemsize,
            rows_per_block=shape.rows_per_block,
            num_columns=min(padded_value_dim, max(STATE_NUMBERS // padded_key_dim, 1)),
            padded_dim=max(padded_key_dim, padded_value_dim),
            padded_key_dim=padded_key_dim,
            padded_taps=triton.next_power_of_2(config.conv_size),
        )


def _vectors(weights: TritonRule) -> _Vectors:
    if isinstance(weights, Mamba2):
        return _Vectors(weights.step_bias, weights.conv_bias, weights.skip)
    return _Vectors(weights.decay_bias, weights.conv, weights.decay_rate)


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
