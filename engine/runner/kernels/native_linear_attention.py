"""Native kernels of recurrent layers for bfloat16 on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.kernels.abi import DeltaArgs, MambaArgs, StateRows, StateRuns
from baton.engine.runner.kernels.native import Kernels, norm_params
from baton.engine.runner.kernels.native_experts import Workspace
from baton.engine.runner.layout import Ints
from baton.engine.runner.model.delta import DeltaWeights
from baton.engine.runner.model.mamba import MambaWeights
from baton.engine.runner.model.recurrent import RecurrentWeights
from baton.engine.runner.state.linear_attention import LinearAttentionPass
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

    def begin(self, layout: StateLayout) -> LinearAttentionPass:
        return _NativePass(self, layout)


class _NativePass:
    """Implements `LinearAttentionPass`."""

    def __init__(self, attention: NativeLinearAttention, layout: StateLayout) -> None:
        self._attention = attention
        self._arrays: list[Ints] = []  # own the memory that `runs` points to
        config, num_tokens = attention.shape.config, int(layout.num_tokens.sum())
        num_kept = len(layout.first_runs) * (config.conv_size - 1)
        self._buffer_sizes = (
            2 * num_kept * config.num_channels,
            4 * num_tokens * config.num_channels,
            8 * num_tokens * config.num_value_heads,
            4 * num_tokens * config.num_values,  # of Mamba2 alone
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

    def mix(
        self, layer: int, weights: RecurrentWeights, projected: Tensor, gates: Tensor
    ) -> Tensor:
        projected, gates = projected.contiguous(), gates.contiguous()
        num_values = self._attention.shape.config.num_values
        output = torch.empty(len(projected), num_values, dtype=projected.dtype)
        inputs_buf, mixed_buf, gates_buf, outputs_buf = self._buffers()
        args: dict[str, object] = {
            **self._shape_args(layer),
            "projected": projected.data_ptr(),
            "gates": gates.data_ptr(),
            "conv": weights.conv.data_ptr(),
            "dst": output.data_ptr(),
            "inputs_buf": inputs_buf,
            "mixed_buf": mixed_buf,
            "gates_buf": gates_buf,
        }
        library = self._attention.kernels.library
        if isinstance(weights, MambaWeights):
            args["outputs_buf"] = outputs_buf
            library.baton_mamba(MambaArgs(**args, **_mamba_args(weights)))
        else:
            assert isinstance(weights, DeltaWeights)
            library.baton_delta(DeltaArgs(**args, **_delta_args(weights)))
        return output

    def _buffers(self) -> list[int]:
        return self._attention.workspace.split(*self._buffer_sizes)

    def _shape_args(self, layer: int) -> dict[str, object]:
        attention, config = self._attention, self._attention.shape.config
        return {
            "states": attention.rows,
            "runs": self._runs,
            "first_row": layer * attention.shape.layer_rows,
            "num_key_heads": config.num_key_heads,
            "num_value_heads": config.num_value_heads,
            "key_dim": config.key_dim,
            "value_dim": config.value_dim,
            "conv_size": config.conv_size,
            "num_threads": attention.kernels.num_threads,
        }


def _delta_args(weights: DeltaWeights) -> dict[str, object]:
    return {
        "decay_bias": weights.decay_bias.data_ptr(),
        "decay_rate": weights.decay_rate.data_ptr(),
        "norm": norm_params(weights.norm),
    }


def _mamba_args(weights: MambaWeights) -> dict[str, object]:
    return {
        "conv_bias": weights.conv_bias.data_ptr(),
        "step_bias": weights.step_bias.data_ptr(),
        "decay_rate": weights.decay_rate.data_ptr(),
        "skip": weights.skip.data_ptr(),
        "norm": norm_params(weights.norm),
    }
