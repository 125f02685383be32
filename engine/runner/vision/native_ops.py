"""Native operations of a vision tower, in bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.kernels.abi import (
    AttentionParams,
    BatchLayout,
    Struct,
)
from baton.engine.runner.kernels.calls import Kernels, PassArrays
from baton.engine.runner.kernels.native import LANES, NativeOps
from baton.engine.runner.kernels.native_attention import paged_kv
from baton.engine.runner.model.config import Activation
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.ops import MlpGate
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.vision.config import TowerActivation
from baton.engine.runner.vision.ops import TorchVisionOps
from baton.engine.runner.vision.weights import AnyNorm

BLOCK_SIZE = 64  # patches; windows of 8x8 patches are whole blocks
GATES = {
    TowerActivation.SILU: MlpGate(Activation.SILU),
    TowerActivation.GELU_TANH: MlpGate(Activation.GELU_TANH),
}


class NativeVisionOps(TorchVisionOps):
    """Operations with kernels. What has none, such as rows of broken vectors, is torch's."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._kernels = ops.kernels

    def norm(self, hidden_states: Tensor, norm: AnyNorm) -> Tensor:
        hidden_states = hidden_states.contiguous()
        if not isinstance(norm, LayerNorm):
            return self._ops.rms_norm(hidden_states, norm)
        return self._ops.layer_norm(hidden_states, norm)

    def activate(self, inputs: Tensor, activation: TowerActivation, *, is_gated: bool) -> Tensor:
        if is_gated and activation in GATES:
            return self._ops.apply_gate(inputs, GATES[activation])
        is_gelu = activation in (TowerActivation.GELU, TowerActivation.GELU_TANH) and not is_gated
        if not is_gelu or inputs.numel() % LANES or not inputs.is_contiguous():
            return super().activate(inputs, activation, is_gated=is_gated)
        self._kernels.call(
            "baton_gelu",
            src=inputs,
            dst=inputs,
            count=inputs.numel(),
            is_exact=activation is TowerActivation.GELU,
        )
        return inputs

    def add(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        return self._ops.add(hidden_states, output, 1.0)

    def attend(
        self, qkv: Tensor, num_heads: int, lens: Sequence[int], angles: Angles | None
    ) -> Tensor:
        query, key, value = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        if angles is not None:
            query, key = self._ops.apply_ropes((query, key), (None, None), angles)
        return _WindowAttention(self._kernels, lens, query, key, value).run()


@dataclass(frozen=True, slots=True)
class _WindowAttention:
    """Paged attention whose sequences are windows, in a cache that lasts for one call."""

    kernels: Kernels
    lens: Sequence[int]
    query: Tensor  # [patches, heads, head_dim], as the others
    key: Tensor
    value: Tensor

    def run(self) -> Tensor:
        num_patches, num_heads, head_dim = self.query.shape
        arrays, query = PassArrays(), self.query.contiguous()
        batch, num_blocks = self._layout(arrays)
        cache = torch.empty(num_blocks, 1, 2, num_heads, BLOCK_SIZE, head_dim, dtype=query.dtype)
        kv = paged_kv(cache, cache[:, 0])
        output = torch.empty_like(query)
        self.kernels.call(
            "baton_write_kv",
            kv=kv,
            batch=batch,
            keys=self.key,
            values=self.value,
            layer=0,
            key_stride=self.key.stride(0),
            value_stride=self.value.stride(0),
        )
        self.kernels.call(
            "baton_attention",
            kv=kv,
            batch=batch,
            params=AttentionParams(scale=head_dim**-0.5),
            queries=query,
            dst=output,
            layer=0,
            num_heads=num_heads,
        )
        return output.view(num_patches, -1)

    def _layout(self, arrays: PassArrays) -> tuple[Struct, int]:
        """Return the batch, and the number of its blocks. Each window has blocks of its own."""
        lens = np.array(self.lens, dtype=np.int64)
        stride = -(-int(lens.max()) // BLOCK_SIZE)
        starts = np.cumsum(lens) - lens
        places = np.arange(lens.sum()) - starts.repeat(lens)
        tables = np.arange(len(lens) * stride).reshape(len(lens), stride)
        blocks = tables[:, 0].repeat(lens) + places // BLOCK_SIZE
        return (
            BatchLayout(
                write_blocks=arrays.address(blocks),
                write_offsets=arrays.address(places % BLOCK_SIZE),
                seen_ends=arrays.address(lens.repeat(lens)),
                block_tables=arrays.address(tables),
                context_lens=arrays.address(lens),
                query_starts=arrays.address(starts),
                num_queries=arrays.address(lens),
                table_stride=stride,
                num_sequences=len(lens),
                num_single=0,
                num_tokens=len(places),
            ),
            tables.size,
        )
