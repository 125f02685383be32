"""Loads a layer with linear attention by the gated delta rule."""

from __future__ import annotations

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.delta import DeltaWeights
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.weights.tensor_loading import TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap


def load_delta(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, DeltaWeights]:
    """Return the first projection of a layer and its other weights.

    The rows of the projection are all queries, all keys, all values and all output gates.
    """
    names = tensors.names.delta
    order, gate_order = _orders(config) if names.is_by_key_head else (None, None)
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


def _orders(config: RecurrentConfig) -> tuple[list[int], list[int]]:
    """Return the order of rows that are stored as those of one key head after the other."""
    values = config.num_values // config.num_key_heads
    heads = config.num_value_heads // config.num_key_heads
    order = _regroup(config.num_key_heads, (config.key_dim, config.key_dim, values, values))
    return order, _regroup(config.num_key_heads, (heads, heads))


def _regroup(num_groups: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the places of all first parts of the groups, then of all second ones, and so on."""
    width, first = sum(sizes), 0
    order: list[int] = []
    for size in sizes:
        for group in range(num_groups):
            start = group * width + first
            order += range(start, start + size)
        first += size
    return order
