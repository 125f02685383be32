"""Native kernels of encoders, in float32 on the CPU: layers as a whole, and their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.encoders.config import EncoderConfig, Gelu
from baton.engine.runner.encoders.encoder import EncodingLayer, UnfusedEncoderLayer
from baton.engine.runner.encoders.ops import EncoderLayer, EncoderWeights, TorchEncoderOps
from baton.engine.runner.encoders.packed_texts import EqualTexts, PackedTexts
from baton.engine.runner.kernels.abi import LayerNormF32, PackedF32, Struct
from baton.engine.runner.kernels.calls import Kernels, Workspace
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear, TorchLinear
from baton.engine.runner.model.rope import Angles

_MATRICES = ("qkv", "output", "up", "down")


class NativeEncoderOps(TorchEncoderOps):
    """Operations with kernels. Attention with windows is left to torch."""

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
            dst=output,
            matrix=self.struct(),
            num_tokens=len(hidden_states),
        )
        return output

    def rows(self, row_ids: Tensor) -> Tensor:
        raise NotImplementedError("embedding tables are not packed")

    def struct(self) -> Struct:
        bias = None if self.bias is None else self.bias.data_ptr()
        return PackedF32(self.packed.data_ptr(), bias, self.num_rows, self.num_columns)


class NativeLayer:
    """Implements `EncodingLayer` in one call, for a layer that norms its sums, as those of BERT."""

    def __init__(
        self, config: EncoderConfig, weights: EncoderLayer, kernels: Kernels, workspace: Workspace
    ) -> None:
        assert weights.attention_norm is not None
        self._weights, self._kernels, self._workspace = weights, kernels, workspace
        self._size, self._mlp_size = config.hidden_size, config.mlp_size
        self._fields = {
            **{name: getattr(weights, name).struct() for name in _MATRICES},
            "attention_norm": _norm_struct(weights.attention_norm),
            "mlp_norm": _norm_struct(weights.mlp_norm),
            "num_heads": config.num_heads,
            "size": config.hidden_size,
            "gelu_is_exact": config.gelu is Gelu.EXACT,
        }

    def __call__(self, hidden_states: Tensor, texts: PackedTexts, angles: Angles | None) -> Tensor:
        hidden_states = hidden_states.contiguous()
        row_bytes = 4 * len(hidden_states)
        size = row_bytes * self._size
        qkv, mixed, mlp = self._workspace.split(3 * size, size, row_bytes * self._mlp_size)
        self._kernels.call(
            "baton_encoder_layer",
            hidden_states=hidden_states,
            qkv_states=qkv,
            mixed=mixed,
            mlp_states=mlp,
            first_tokens=texts.starts.ctypes.data,
            num_texts=len(texts.rows),
            **self._fields,
        )
        return hidden_states


def native_layers(
    config: EncoderConfig, weights: EncoderWeights, kernels: Kernels
) -> list[EncodingLayer]:
    """Return the layers, as one call each where it computes everything that the layer has."""
    ops, workspace = NativeEncoderOps(kernels), Workspace()
    layers: list[EncodingLayer] = []
    for index, layer in enumerate(weights.layers):
        own = config.layers[index]
        is_plain = not config.is_pre_norm and not config.is_gated
        is_plain = is_plain and own.rope is None and own.window is None
        matrices = [getattr(layer, name) for name in _MATRICES]
        if is_plain and all(isinstance(matrix, NativeFloat32Linear) for matrix in matrices):
            layers.append(NativeLayer(config, layer, kernels, workspace))
        else:
            layers.append(UnfusedEncoderLayer(config, index, ops, layer))
    return layers


def with_packed_layers(weights: EncoderWeights, kernels: Kernels) -> EncoderWeights:
    """Return the weights with packed copies of the layers' matrices, instead of the matrices."""
    return replace(weights, layers=[_packed_layer(layer, kernels) for layer in weights.layers])


def _norm_struct(norm: LayerNorm) -> Struct:
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return LayerNormF32(norm.weight.data_ptr(), bias, norm.epsilon)


def _packed_layer(layer: EncoderLayer, kernels: Kernels) -> EncoderLayer:
    return replace(
        layer,
        qkv=pack_linear(layer.qkv, kernels),
        output=pack_linear(layer.output, kernels),
        up=pack_linear(layer.up, kernels),
        down=pack_linear(layer.down, kernels),
    )


def pack_linear(linear: Linear, kernels: Kernels) -> Linear:
    """Return a plain layer with a packed copy of its weight, and any other layer as it is."""
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
