"""Loads the weights of recurrent layers."""

from __future__ import annotations

from baton.engine.runner.model.config import Recurrence, RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.recurrent import (
    DeltaWeights,
    MambaWeights,
    RecurrentWeights,
    ShortConvWeights,
)
from baton.engine.runner.weights.row_orders import (
    channel_order,
    conv_orders,
    delta_orders,
    mamba_orders,
)
from baton.engine.runner.weights.tensor_loading import TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap


def load_recurrent(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, RecurrentWeights, str]:
    """Return a layer's first projection, its other weights and the name of its last projection.

    The rows of the first projection, and the channels of the convolution, are all queries, all
    keys and all values. In the projection all output gates follow. That of a short convolution has
    the rows of its factors and values.
    """
    if config.rule is Recurrence.SHORT_CONV:
        return *_load_conv(config, tensors, loader, index), tensors.names.short_conv.output
    if config.rule is Recurrence.MAMBA2:
        return *_load_mamba(config, tensors, loader, index), tensors.names.mamba.output
    return *_load_delta(config, tensors, loader, index), tensors.names.delta.output


def _load_delta(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, DeltaWeights]:
    names = tensors.names.delta
    order, gate_order = delta_orders(config) if names.is_by_key_head else (None, None)
    projection = loader.linear(tensors.in_layers(index, names.projections), False, order)
    conv = loader.vector(tensors.in_layer(index, f"{names.conv}.weight"))
    # The gates are few, and errors of a decay add up: they keep their dtype.
    gates = loader.linear(
        tensors.in_layers(index, names.gates), False, gate_order, keeps_dtype=True
    )
    weights = DeltaWeights(
        gates=gates,
        conv=conv[:, 0].T.contiguous(),
        decay_bias=loader.vector(tensors.in_layer(index, names.decay_bias)),
        decay_rate=loader.vector(tensors.in_layer(index, names.log_decay)).exp(),
        norm=loader.gated_norm(tensors.in_layer(index, names.norm)),
    )
    return projection, weights


def _load_mamba(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, MambaWeights]:
    names, order = tensors.names.mamba, channel_order(config)
    projection, gates = loader.split_linear(
        tensors.in_layer(index, names.projection), *mamba_orders(config)
    )
    conv, conv_bias = (
        loader.vector(tensors.in_layer(index, f"{names.conv}.{part}"))[order]
        for part in ("weight", "bias")
    )
    weights = MambaWeights(
        gates=gates,
        conv=conv[:, 0].T.contiguous(),
        conv_bias=conv_bias,
        step_bias=loader.vector(tensors.in_layer(index, names.step_bias)),
        decay_rate=loader.vector(tensors.in_layer(index, names.log_decay)).exp(),
        skip=loader.vector(tensors.in_layer(index, names.skip)),
        norm=loader.gated_norm(tensors.in_layer(index, names.norm)),
    )
    return projection, weights


def _load_conv(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, ShortConvWeights]:
    names = tensors.names.short_conv
    projection, gates = loader.split_linear(
        tensors.in_layer(index, names.projection), *conv_orders(config)
    )
    conv = loader.vector(tensors.in_layer(index, f"{names.conv}.weight"))
    return projection, ShortConvWeights(gates, conv[:, 0].T.contiguous())
