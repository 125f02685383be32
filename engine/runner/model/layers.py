"""Decoder layers: their Protocol and the reference, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Laurel, Layer, ParallelMoe
from baton.engine.runner.model.linear import Moe
from baton.engine.runner.model.mixers import Ends, ForwardPass, Mixer, make_mixer
from baton.engine.runner.model.mlp import compute_moe, compute_parallel
from baton.engine.runner.model.ops import MlpGate, Norm, Ops


class LayerInput(NamedTuple):
    """Hidden states between two layers."""

    hidden_states: Tensor
    normed: Tensor | None = None  # by the input norm, if the layer before has computed it


class DecoderLayer(Protocol):
    """A layer of the decoder, with or without fused kernels, or several of them."""

    @property
    def adds_low_rank(self) -> bool:
        """Return whether `forward` adds the products of the pass's adapters."""
        ...

    @property
    def extends_output(self) -> bool:
        """Return whether `forward` adds the layer's own input and scales the output."""
        ...

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        """Compute the layer; with `ends`, return those tokens alone, after all wrote their KV.

        The input can be overwritten: do not use it after the call.
        """
        ...

    def joined(self, after: DecoderLayer) -> DecoderLayer | None:
        """Return a layer that computes this one and the one after it, if that is faster."""
        ...


# Returns memory for a copy of the hidden states that enter a layer: a row per token, at any stride.
Tap = Callable[[Tensor], Tensor]


@runtime_checkable
class CopiesInput(Protocol):
    """Layer that can copy its input at less cost than an operation of its own."""

    def copying_to(self, tap: Tap) -> DecoderLayer | None:
        """Return this layer with a tap; None if it has one already."""
        ...


LAUREL_SCALE = math.sqrt(0.5)  # of the sum of hidden states, output of attention and residual


@dataclass(frozen=True, slots=True)
class UnfusedLayer:
    """Reference implementation: one operation of `Ops` after the other."""

    adds_low_rank: ClassVar[bool] = False
    extends_output: ClassVar[bool] = False

    config: ModelConfig
    ops: Ops
    layer: Layer
    mixer: Mixer
    next_norm: Norm | None = None  # input norm of the next layer

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        layer, (hidden_states, normed) = self.layer, inputs
        if normed is None:
            normed = _apply_norm(self.ops, hidden_states, layer.input_norm)
        mixed = self.mixer.mix(forward_pass, normed, ends)
        if ends is not None:
            hidden_states = hidden_states[ends.indices]
            if not len(hidden_states):
                return LayerInput(hidden_states)
        output = layer.output(mixed)
        if layer.mlp is None:
            output = _apply_norm(self.ops, output, layer.attention_norm)
        else:
            scale = self.config.residual_scale
            if layer.laurel is not None:
                normed = normed if ends is None else normed[ends.indices]
                hidden_states = _add_laurel(self.ops, layer.laurel, hidden_states, normed)
                scale = LAUREL_SCALE
            if self.config.has_parallel_mlp:
                mlp_input = normed if ends is None else normed[ends.indices]
                hidden_states = self.ops.add(hidden_states, output, scale)
            else:
                hidden_states, mlp_input = self._add_and_norm(hidden_states, output, scale)
            output = compute_output(self.config, self.ops, layer, mlp_input)
        if self.next_norm is None:
            return LayerInput(self.ops.add(hidden_states, output, self.config.residual_scale))
        scale, norm = self.config.residual_scale, self.next_norm
        return LayerInput(*self.ops.add_and_norm(hidden_states, output, scale, norm))

    def joined(self, after: DecoderLayer) -> None:
        return None

    def _add_and_norm(
        self, hidden_states: Tensor, output: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return `hidden_states` plus the output of the mixer, and the input of the MLP."""
        layer, ops = self.layer, self.ops
        output = _apply_norm(ops, output, layer.attention_norm)
        if layer.mlp_norm is None:
            added = ops.add(hidden_states, output, scale)
            return added, added
        return ops.add_and_norm(hidden_states, output, scale, layer.mlp_norm)


def unfused_layers(
    ops: Ops, config: ModelConfig, layers: Sequence[Layer]
) -> Sequence[DecoderLayer]:
    next_norms = [layer.input_norm for layer in layers[1:]] + [None]
    return [
        UnfusedLayer(config, ops, layer, make_mixer(config, ops, layer, index), next_norm)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True))
    ]


def join_layers(layers: Sequence[DecoderLayer], alone: int) -> tuple[Sequence[DecoderLayer], int]:
    """Return the layers, joined where that is faster but for one, and the place of that one."""
    before = _joined(layers[:alone])
    return [*before, layers[alone], *_joined(layers[alone + 1 :])], len(before)


def _joined(layers: Sequence[DecoderLayer]) -> Sequence[DecoderLayer]:
    made: list[DecoderLayer] = []
    for layer in layers:
        both = made[-1].joined(layer) if made else None
        made[-1:] = [*made[-1:], layer] if both is None else [both]
    return made


def gate_of(config: ModelConfig) -> MlpGate:
    return MlpGate(config.activation, config.swiglu_alpha, config.swiglu_limit)


def compute_output(config: ModelConfig, ops: Ops, layer: Layer, mlp_input: Tensor) -> Tensor:
    """Return the output of the layer's MLP or experts, and its norm if there is one."""
    gate = gate_of(config)
    if isinstance(layer.mlp, Moe):
        output = compute_moe(ops, layer.mlp, gate, mlp_input)
    elif isinstance(layer.mlp, ParallelMoe):
        output = compute_parallel(ops, layer.mlp, gate, mlp_input)
    else:
        assert layer.mlp is not None
        output = ops.compute_mlp(layer.mlp, gate, mlp_input)
    return _apply_norm(ops, output, layer.mlp_output_norm)


def _add_laurel(ops: Ops, laurel: Laurel, hidden_states: Tensor, normed: Tensor) -> Tensor:
    """Return the sum of hidden states, normed input and learned residual, scaled."""
    learned = ops.rms_norm(laurel.right(laurel.left(normed)), laurel.norm)
    return (hidden_states + normed + learned) * LAUREL_SCALE


def _apply_norm(ops: Ops, hidden_states: Tensor, norm: Norm | None) -> Tensor:
    return hidden_states if norm is None else ops.rms_norm(hidden_states, norm)
