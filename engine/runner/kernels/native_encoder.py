"""Native kernels of encoders, in float32 on the CPU: linear layers, GELU and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.runner.encoders.config import Gelu
from baton.engine.runner.encoders.ops import TorchEncoderOps
from baton.engine.runner.encoders.packed_texts import EqualTexts
from baton.engine.runner.encoders.weights import EncoderLayer, EncoderWeights
from baton.engine.runner.host_memory import huge_page_memory
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.torch_ops import TorchLinear


class NativeEncoderOps(TorchEncoderOps):
    """Implements `EncoderOps`. Attention with windows is left to torch."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def gelu(self, inputs: Tensor, kind: Gelu) -> Tensor:
        inputs = inputs.contiguous()
        output = torch.empty_like(inputs)
        self._kernels.call(
            "baton_gelu_f32",
            src=inputs,
            dst=output,
            count=inputs.numel(),
            is_exact=kind is Gelu.EXACT,
        )
        return output

    def attend(
        self, qkv: Tensor, num_heads: int, groups: Sequence[EqualTexts], window: int | None
    ) -> Tensor:
        if window is not None and window < groups[-1].num_tokens - 1:
            return super().attend(qkv, num_heads, groups, window)
        size = qkv.shape[1] // 3
        output = torch.empty(len(qkv), size)
        firsts = [
            first for group in groups for first in range(group.first, group.end, group.num_tokens)
        ]
        first_tokens = torch.tensor([*firsts, len(qkv)])
        self._kernels.call(
            "baton_text_attention",
            qkv=qkv,
            dst=output,
            first_tokens=first_tokens,
            num_texts=len(firsts),
            num_heads=num_heads,
            head_dim=size // num_heads,
            size=size,
            scale=(size // num_heads) ** -0.5,
        )
        return output


@dataclass(frozen=True, slots=True)
class NativeFloat32Linear:
    """Implements `Linear` with a packed copy of the weight."""

    kernels: Kernels
    packed: Tensor
    bias: Tensor | None
    num_rows: int
    num_columns: int

    def __call__(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        output = torch.empty(len(hidden_states), self.num_rows)
        self.kernels.call(
            "baton_linear_f32",
            src=hidden_states,
            packed=self.packed,
            bias=self.bias,
            dst=output,
            num_rows=self.num_rows,
            num_columns=self.num_columns,
            num_tokens=len(hidden_states),
        )
        return output

    def rows(self, row_ids: Tensor) -> Tensor:
        raise NotImplementedError("embedding tables are not packed")


def with_packed_layers(weights: EncoderWeights, kernels: Kernels) -> EncoderWeights:
    """Return the weights with packed copies of the layers' matrices, instead of the matrices."""
    return replace(weights, layers=[_packed_layer(layer, kernels) for layer in weights.layers])


def _packed_layer(layer: EncoderLayer, kernels: Kernels) -> EncoderLayer:
    return replace(
        layer,
        qkv=_packed(layer.qkv, kernels),
        output=_packed(layer.output, kernels),
        up=_packed(layer.up, kernels),
        down=_packed(layer.down, kernels),
    )


def _packed(linear: Linear, kernels: Kernels) -> Linear:
    if not isinstance(linear, TorchLinear):  # such as quantized weights
        return linear
    num_rows, num_columns = linear.weight.shape
    num_bytes = 4 * kernels.library.baton_packed_f32_size(num_rows, num_columns)
    packed = torch.frombuffer(huge_page_memory(num_bytes), dtype=torch.float32)
    weights = linear.weight.contiguous()
    kernels.call(
        "baton_pack_f32",
        weights=weights,
        packed=packed,
        num_rows=num_rows,
        num_columns=num_columns,
    )
    return NativeFloat32Linear(kernels, packed, linear.bias, num_rows, num_columns)
