"""Alternating updates (AltUp), of Gemma 3n.

The hidden states of a token are several streams: [tokens, streams, hidden_size] between layers. A
layer predicts all of them from all, computes one, and corrects the others by the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from baton.engine.runner.model.config import AltUpConfig, ModelConfig
from baton.engine.runner.model.layer_weights import AltUpWeights, Layer, PerLayerWeights
from baton.engine.runner.model.layers import DecoderLayer, LayerInput, gate_of
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import MlpGate, Ops
from baton.engine.runner.model.per_layer import alone, gate_own_input

MIN_POWER = 1e-5  # mean square of a stream whose magnitude is changed


@dataclass(frozen=True, slots=True)
class StreamProjections:
    """Makes streams of embeddings, and hidden states of streams."""

    projection: Linear  # rows of all streams but the first one
    unembed: Sequence[Linear]  # of each stream but the first one

    def expand(self, embeddings: Tensor) -> Tensor:
        """[tokens, hidden_size] → [tokens, streams, hidden_size]."""
        projected = self.projection(embeddings).view(len(embeddings), -1, embeddings.shape[1])
        first = embeddings[:, None]
        others = _with_power_of(first, projected).to(embeddings.dtype)
        return torch.cat((first, others), dim=1)

    def merge(self, streams: Tensor) -> Tensor:
        """[tokens, streams, hidden_size] → [tokens, hidden_size], their mean."""
        first, *others = streams.unbind(1)
        total = first.float()
        for linear, stream in zip(self.unembed, others, strict=True):
            total = total + _with_power_of(first, linear(stream.contiguous()))
        return (total / streams.shape[1]).to(streams.dtype)


@dataclass(frozen=True, slots=True)
class AltUpLayer:
    """Implements `DecoderLayer`: a layer that computes one of several streams."""

    extends_output: ClassVar[bool] = True
    layer: DecoderLayer  # computes the active stream
    index: int
    ops: Ops
    gate: MlpGate
    config: AltUpConfig
    weights: AltUpWeights
    own_input: PerLayerWeights
    projections: StreamProjections
    is_first: bool  # its input is that of one stream
    is_last: bool  # as is its output

    @property
    def adds_low_rank(self) -> bool:
        return self.layer.adds_low_rank

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        streams = inputs.hidden_states
        predicted = self._predict(self.projections.expand(streams) if self.is_first else streams)
        active = predicted[:, self.config.active].to(streams.dtype, copy=True)
        output = self.layer.forward(forward_pass, LayerInput(active), ends).hidden_states
        if not len(output):
            return LayerInput(output)
        own = forward_pass.per_layer_inputs
        assert own is not None
        own = own[:, self.index]
        if ends is not None:
            predicted, own = predicted[ends.indices], own[ends.indices]
        corrected = self._correct(predicted, output)
        corrected[:, 1:] += self._gate_own_input(corrected, own)[:, None]
        corrected = corrected.to(streams.dtype)
        return LayerInput(self.projections.merge(corrected) if self.is_last else corrected)

    def joined(self, after: DecoderLayer) -> None:
        return None

    def _predict(self, streams: Tensor) -> Tensor:
        """Return the streams with weighted sums of all of them, in float32."""
        routed = self._route(streams[:, self.config.active].contiguous())
        weights = (self.weights.prediction * routed[:, None, None]).sum(-1)
        wide = streams.float()
        predicted = wide.clone()
        # One after the other: the sums of a matrix product can depend on the batch.
        for number, stream in enumerate(wide.unbind(1)):
            predicted.addcmul_(weights[:, :, number, None], stream[:, None])
        return predicted

    def _correct(self, predicted: Tensor, output: Tensor) -> Tensor:
        """Return the streams, corrected in place by the difference of the computed one."""
        weights = (self.weights.correction * self._route(output)[:, None]).sum(-1) + 1
        difference = output - predicted[:, self.config.active]
        return predicted.addcmul_(weights[:, :, None], difference[:, None])

    def _route(self, stream: Tensor) -> Tensor:
        """[tokens, hidden_size] → [tokens, outputs of the router] in float32."""
        routed = self.weights.router(self.ops.rms_norm(stream, self.weights.router_norm))
        return (routed.float() / stream.shape[1]).tanh()

    def _gate_own_input(self, corrected: Tensor, own: Tensor) -> Tensor:
        active, scale = corrected[:, self.config.active], self.weights.output_scale
        active = active.contiguous() if scale is None else active * scale
        return gate_own_input(self.ops, self.gate, self.own_input, active.to(own.dtype), own)


def _with_power_of(first: Tensor, others: Tensor) -> Tensor:
    """Return streams in float32, scaled to the mean square of the first one."""
    wide = others.float()
    power = wide.square().mean(-1, keepdim=True).clamp(min=MIN_POWER)
    return wide * (first.float().square().mean(-1, keepdim=True) / power).sqrt()


def stream_layers(
    config: ModelConfig,
    ops: Ops,
    projections: StreamProjections,
    layers: Sequence[Layer],
    made: Sequence[DecoderLayer],
) -> Sequence[DecoderLayer]:
    """Return layers that predict and correct streams, of which the layers `made` compute one."""
    found = []
    for index, (own, layer) in enumerate(zip(made, layers, strict=True)):
        assert config.altup is not None
        assert layer.altup is not None
        assert layer.per_layer is not None
        found.append(
            AltUpLayer(
                alone(own),
                index,
                ops,
                gate_of(config),
                config.altup,
                layer.altup,
                layer.per_layer,
                projections,
                is_first=index == 0,
                is_last=index == len(made) - 1,
            )
        )
    return found
