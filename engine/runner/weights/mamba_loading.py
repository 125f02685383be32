"""Loads a Mamba2 layer."""

from __future__ import annotations

from itertools import chain

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mamba import MambaWeights
from baton.engine.runner.weights.tensor_loading import TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap


def load_mamba(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, MambaWeights]:
    """Return the first projection of a layer and its other weights.

    The rows of the projection are all queries (C), all keys (B), all values (x) and all output
    gates; the channels of the convolution are in the same order.
    """
    names, values, keys = tensors.names.mamba, config.num_values, config.num_keys
    order = channel_order(config)
    rows = [*(values + channel for channel in order), *range(values)]
    num_rows = 2 * values + 2 * keys
    projection, gates = loader.split_linear(
        tensors.in_layer(index, names.projection),
        rows,
        range(num_rows, num_rows + config.num_gates),
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


def channel_order(config: RecurrentConfig) -> list[int]:
    """Return the places of queries, keys and values among values, keys and queries."""
    values, keys = config.num_values, config.num_keys
    parts = (values + keys, keys), (values, keys), (0, values)
    return list(chain.from_iterable(range(first, first + size) for first, size in parts))
