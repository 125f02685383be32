"""Decoder layers: their Protocol and the reference, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.linear import Moe
from baton.engine.runner.model.mixers import Ends, ForwardPass, Mixer, make_mixer
from baton.engine.runner.model.mlp import compute_mlp, compute_moe
from baton.engine.runner.model.ops import MlpGate, Norm, Ops


class DecoderLayer(Protocol):
    """A layer of the decoder, with or without fused kernels: each layer for itself."""

    @property
    def adds_low_rank(self) -> bool:
        """Return whether `forward` adds the products of the pass's adapters."""
        ...

    def forward(
        self, forward_pass: ForwardPass, hidden_states: Tensor, ends: Ends | None
    ) -> Tensor:
        """Compute the layer; with `ends`, return those tokens alone, after all wrote their KV.

        The input can be overwritten: do not use it after the call.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnfusedLayer:
    """Reference implementation: one operation of `Ops` after the other."""

    adds_low_rank: ClassVar[bool] = False

    config: ModelConfig
    ops: Ops
    layer: Layer
    mixer: Mixer

    def forward(
        self, forward_pass: ForwardPass, hidden_states: Tensor, ends: Ends | None
    ) -> Tensor:
        layer, config, ops = self.layer, self.config, self.ops
        inputs = _apply_norm(ops, hidden_states, layer.input_norm)
        mixed = self.mixer.mix(forward_pass, inputs, ends)
        if ends is not None:
            hidden_states = hidden_states[ends.indices]
            if not len(hidden_states):
                return hidden_states
        hidden_states, mlp_input = self._add_and_norm(hidden_states, layer.output(mixed))
        return add_mlp(config, ops, layer, hidden_states, mlp_input)

    def _add_and_norm(self, hidden_states: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden_states` plus the output of the mixer, and the input of the MLP."""
        layer, config, ops = self.layer, self.config, self.ops
        if layer.mlp_norm is None:
            added = _add(config, ops, hidden_states, output, layer.attention_norm)
            return added, added
        output = _apply_norm(ops, output, layer.attention_norm)
        return ops.add_and_norm(hidden_states, output, config.residual_scale, layer.mlp_norm)


def unfused_layers(
    ops: Ops, config: ModelConfig, layers: Sequence[Layer]
) -> Sequence[DecoderLayer]:
    return [
        UnfusedLayer(config, ops, layer, make_mixer(config, ops, layer, index))
        for index, layer in enumerate(layers)
    ]


def gate_of(config: ModelConfig) -> MlpGate:
    return MlpGate(config.activation, config.swiglu_alpha, config.swiglu_limit)


def add_mlp(
    config: ModelConfig, ops: Ops, layer: Layer, hidden_states: Tensor, mlp_input: Tensor
) -> Tensor:
    """Return `hidden_states` plus the output of the layer's MLP or experts for `mlp_input`."""
    gate = gate_of(config)
    if isinstance(layer.mlp, Moe):
        output = compute_moe(ops, layer.mlp, gate, mlp_input)
    else:
        output = compute_mlp(ops, layer.mlp, gate, mlp_input)
    return _add(config, ops, hidden_states, output, layer.mlp_output_norm)


def _add(
    config: ModelConfig, ops: Ops, hidden_states: Tensor, output: Tensor, norm: Norm | None
) -> Tensor:
    """Return `hidden_states` plus the norm of an output, scaled."""
    return ops.add(hidden_states, _apply_norm(ops, output, norm), config.residual_scale)


def _apply_norm(ops: Ops, hidden_states: Tensor, norm: Norm | None) -> Tensor:
    return hidden_states if norm is None else ops.rms_norm(hidden_states, norm)
