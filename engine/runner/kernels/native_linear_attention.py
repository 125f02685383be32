"""Native kernels of recurrent layers for bfloat16 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.kernels.abi import StateRows, StateRuns
from baton.engine.runner.kernels.calls import Kernels, PassArrays, Workspace, norm_params
from baton.engine.runner.model.mixers import LinearAttentionPass
from baton.engine.runner.model.recurrent.matrix_rule import MatrixRule
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.state.state_tables import StateLayout


class NativeLinearAttention:
    """Implements `LinearAttention`. A token's output depends only on its own sequence."""

    def __init__(self, kernels: Kernels, kv: Tensor, shape: StateShape) -> None:
        self.kernels = kernels
        self.shape = shape
        self.rows = StateRows(
            kv.data_ptr(), shape.block_bytes, shape.row_bytes, shape.rows_per_block
        )
        self.workspace = Workspace()

    def begin(self, layout: StateLayout, inputs: StepInputs = SHARED_INPUTS) -> LinearAttentionPass:
        return _NativePass(self, layout)


class _NativePass:
    """Implements `LinearAttentionPass`."""

    def __init__(self, attention: NativeLinearAttention, layout: StateLayout) -> None:
        self._attention = attention
        config, num_tokens = attention.shape.config, int(layout.num_tokens.sum())
        num_kept = len(layout.first_runs) * (config.conv_size - 1)
        self._buffer_sizes = (
            2 * num_kept * config.num_channels,
            4 * num_tokens * config.num_channels,
            4 * num_tokens * config.num_value_heads * (1 + config.num_decays),
            4 * num_tokens * config.num_values,
        )
        self._arrays = arrays = PassArrays()
        self._runs = StateRuns(
            first_tokens=arrays.address(layout.first_tokens),
            num_tokens_of=arrays.address(layout.num_tokens),
            reads=arrays.address(layout.reads),
            writes=arrays.address(layout.writes),
            first_runs=arrays.address(layout.first_runs),
            num_blocks=layout.reads.shape[1],
            num_runs=len(layout.reads),
            num_sequences=len(layout.first_runs),
            num_tokens=num_tokens,
        )

    def mix(self, layer: int, weights: RecurrentRule, projected: Tensor, gates: Tensor) -> Tensor:
        attention, config = self._attention, self._attention.shape.config
        output = torch.empty(len(projected), config.num_values, dtype=projected.dtype)
        buffers = attention.workspace.split(*self._buffer_sizes)
        inputs_buf, mixed_buf, gates_buf, outputs_buf = buffers
        own: dict[str, object] = {name: getattr(weights, name) for name in weights.kernel_fields}
        if isinstance(weights, MatrixRule):
            own |= {"norm": norm_params(weights.norm)}
            own |= {"gates_buf": gates_buf, "outputs_buf": outputs_buf}
        attention.kernels.call(
            weights.kernel,
            states=attention.rows,
            runs=self._runs,
            projected=projected.contiguous(),
            gates=gates.contiguous(),
            conv=weights.conv,
            dst=output,
            inputs_buf=inputs_buf,
            mixed_buf=mixed_buf,
            first_row=layer * attention.shape.layer_rows,
            num_key_heads=config.num_key_heads,
            num_value_heads=config.num_value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_size=config.conv_size,
            **own,
        )
        return output
