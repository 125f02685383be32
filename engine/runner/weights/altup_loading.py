"""Loads what layers with several streams of hidden states (AltUp) have besides other layers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.runner.model.altup import AltUpLayer, AltUpWeights, StreamProjections
from baton.engine.runner.model.config import AltUpConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer, gate_of
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.model.per_layer import alone
from baton.engine.runner.weights.tensor_loading import TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap


def stream_layers(
    config: AltUpConfig,
    tensors: TensorMap,
    loader: TensorLoader,
    ops: Ops,
    layers: Sequence[Layer],
    made: Sequence[DecoderLayer],
) -> Sequence[DecoderLayer]:
    """Return layers that predict and correct streams, of which the layers `made` compute one."""
    names = tensors.stream_projections()
    into, out = names[: config.num_streams - 1], names[config.num_streams - 1 :]
    projections = StreamProjections(
        loader.linear(into, False, is_sensitive=True),
        [loader.linear([name], False, is_sensitive=True) for name in out],
    )
    found = []
    for index, (own, layer) in enumerate(zip(made, layers, strict=True)):
        assert layer.per_layer is not None
        found.append(
            AltUpLayer(
                alone(own),
                index,
                ops,
                gate_of(tensors.config),
                config,
                _load_weights(config, tensors, loader, index),
                layer.per_layer,
                projections,
                is_first=index == 0,
                is_last=index == len(made) - 1,
            )
        )
    return found


def _load_weights(
    config: AltUpConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> AltUpWeights:
    names, count = tensors.names.altup, config.num_streams
    router, norm, prediction, correction, scale = tensors.in_layers(
        index,
        (names.router, names.router_norm, names.prediction, names.correction, names.output_scale),
    )
    output_scale = loader.vector(scale)
    return AltUpWeights(
        loader.linear([router], False, keeps_dtype=True),
        loader.norm(norm),
        loader.vector(f"{prediction}.weight").view(count, count, count),
        loader.vector(f"{correction}.weight"),
        output_scale if config.has_output_scale else None,
    )
