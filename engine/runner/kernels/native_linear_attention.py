"""Native linear attention for bfloat16 on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.runner.kernels.abi import DeltaArgs, StateRows, StateRuns
from engine.runner.kernels.native import Kernels, norm_params
from engine.runner.kernels.native_experts import Workspace
from engine.runner.layout import Ints
from engine.runner.model.delta import DeltaWeights
from engine.runner.state.linear_attention import LinearAttentionPass
from engine.runner.state.state_shape import StateShape
from engine.runner.state.state_tables import StateLayout


class NativeLinearAttention:
    """Implements `LinearAttention`. A token's output depends only on its own sequence."""

    def __init__(self, kernels: Kernels, kv: Tensor, shape: StateShape) -> None:
        self.kernels = kernels
        self.shape = shape
        self.rows = StateRows(
            kv.data_ptr(), shape.block_bytes, shape.row_bytes, shape.rows_per_block
        )
        self.workspace = Workspace()

    def begin(self, layout: StateLayout) -> LinearAttentionPass:
        return _NativePass(self, layout)


class _NativePass:
    """Implements `LinearAttentionPass`."""

    def __init__(self, attention: NativeLinearAttention, layout: StateLayout) -> None:
        self._attention = attention
        self._arrays: list[Ints] = []  # own the memory that `runs` points to
        delta, num_tokens = attention.shape.delta, int(layout.num_tokens.sum())
        num_kept = len(layout.first_runs) * (delta.conv_size - 1)
        self._buffer_sizes = (
            2 * num_kept * delta.num_channels,
            4 * num_tokens * delta.num_channels,
            8 * num_tokens * delta.num_value_heads,
        )
        self._runs = StateRuns(
            first_tokens=self._address(layout.first_tokens),
            num_tokens_of=self._address(layout.num_tokens),
            reads=self._address(layout.reads),
            writes=self._address(layout.writes),
            first_runs=self._address(layout.first_runs),
            num_blocks=layout.reads.shape[1],
            num_runs=len(layout.reads),
            num_sequences=len(layout.first_runs),
            num_tokens=num_tokens,
        )

    def _address(self, array: Ints) -> int:
        self._arrays.append(np.ascontiguousarray(array))
        return int(self._arrays[-1].ctypes.data)

    def mix(self, layer: int, weights: DeltaWeights, projected: Tensor, gates: Tensor) -> Tensor:
        attention, shape = self._attention, self._attention.shape
        projected, gates, delta = projected.contiguous(), gates.contiguous(), shape.delta
        output = torch.empty(len(projected), delta.num_values, dtype=projected.dtype)
        buffers = attention.workspace.split(*self._buffer_sizes)
        attention.kernels.library.baton_delta(
            DeltaArgs(
                states=attention.rows,
                runs=self._runs,
                projected=projected.data_ptr(),
                gates=gates.data_ptr(),
                conv=weights.conv.data_ptr(),
                decay_bias=weights.decay_bias.data_ptr(),
                decay_rate=weights.decay_rate.data_ptr(),
                norm=norm_params(weights.norm),
                dst=output.data_ptr(),
                inputs_buf=buffers[0],
                mixed_buf=buffers[1],
                gates_buf=buffers[2],
                first_row=layer * shape.layer_rows,
                num_key_heads=delta.num_key_heads,
                num_value_heads=delta.num_value_heads,
                key_dim=delta.key_dim,
                value_dim=delta.value_dim,
                conv_size=delta.conv_size,
                num_threads=attention.kernels.num_threads,
            )
        )
        return output
