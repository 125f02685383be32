"""Decoder layers: their Protocol and the reference, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.linear import Moe
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.mixers import Ends, ForwardPass, Mixer, make_mixer
from baton.engine.runner.model.mlp import compute_mlp, compute_moe
from baton.engine.runner.model.ops import MlpGate, Norm, Ops


class DecoderLayer(Protocol):
    """A layer of the decoder, with or without fused kernels: each layer for itself."""

    @property
    def needs_all_tokens(self) -> bool:
        """See `Mixer.needs_all_tokens`."""
        ...

    def through(self, forward_pass: ForwardPass, hidden_states: Tensor) -> Tensor:
        """Compute the layer. The input can be overwritten: do not use it after the call."""
        ...

    def write(self, forward_pass: ForwardPass, hidden_states: Tensor) -> None:
        """Only write what later tokens need. Not if the layer needs all tokens."""
        ...


def compute_ends(
    layer: DecoderLayer, forward_pass: ForwardPass, hidden_states: Tensor, ends: Ends
) -> Tensor:
    """Compute the last layer: only these tokens if it can, after it wrote those of all."""
    if layer.needs_all_tokens:
        return layer.through(forward_pass, hidden_states)[ends.places]
    layer.write(forward_pass, hidden_states)
    at_ends = hidden_states[ends.places]
    return layer.through(forward_pass.restrict_to(ends), at_ends) if len(at_ends) else at_ends


class UnfusedLayer:
    """Reference implementation: one operation of `Ops` after the other."""

    def __init__(self, config: ModelConfig, ops: Ops, layer: Layer, mixer: Mixer) -> None:
        self._config = config
        self._ops = ops
        self._layer = layer
        self._mixer = mixer
        self.needs_all_tokens = mixer.needs_all_tokens

    def through(self, forward_pass: ForwardPass, hidden_states: Tensor) -> Tensor:
        layer, config, ops = self._layer, self._config, self._ops
        inputs = _apply_norm(ops, hidden_states, layer.input_norm)
        output = layer.output(self._mixer.mix(forward_pass, inputs))
        hidden_states = _add(config, ops, hidden_states, output, layer.attention_norm)
        mlp_input = _apply_norm(ops, hidden_states, layer.mlp_norm)
        return add_mlp(config, ops, layer, hidden_states, mlp_input)

    def write(self, forward_pass: ForwardPass, hidden_states: Tensor) -> None:
        inputs = _apply_norm(self._ops, hidden_states, self._layer.input_norm)
        self._mixer.write(forward_pass, inputs)


def unfused_layers(
    config: ModelConfig, ops: Ops, layers: Sequence[Layer]
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
