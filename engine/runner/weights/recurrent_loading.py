"""Loads the weights of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import ExtendedLinear, Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.weights.layer_tensors import LayerTensors
from baton.engine.runner.weights.loader import Stack


class RecurrentWeights(NamedTuple):
    inputs: Linear  # the first projection
    rule: RecurrentRule
    output: Stack  # the last projection, which is not loaded


def load_recurrent(
    config: RecurrentConfig, tensors: LayerTensors, place: str = "qkv"
) -> RecurrentWeights:
    """Load the rule of a layer. `place` is that of its first projection."""
    names, rule, hidden = tensors.names.recurrent, RULES[config.rule], tensors.config.hidden_size
    orders, parts = rule.stored_rows(config), _channel_parts(config)
    num_rows, num_gates = map(len, orders)
    rows = {
        1: [num_rows if names.gates else num_rows + num_gates],
        2: [config.num_channels, config.num_values],
        3: parts,
        4: [*parts, config.num_values],
    }
    first = Stack(names.projections, rows[len(names.projections)], hidden)
    first = replace(first, place=tensors.place(place))
    # The gates are few, and errors of a decay add up: they keep their dtype.
    second = Stack(names.gates, [], hidden, keeps_dtype=True, place=tensors.place("gates"))
    if not names.gates:
        first = replace(first, order=orders[0], is_part=True)
        second = replace(first, order=orders[1], keeps_dtype=True, place=second.place)
        inputs, gates = tensors.loader.split_linear(*map(tensors.in_layer, (first, second)))
    else:
        count = config.num_value_heads if names.low_rank else num_gates // len(names.gates)
        second = replace(second, rows=[count] * len(names.gates))
        if len(names.projections) == 1:
            first, second = replace(first, order=orders[0]), replace(second, order=orders[1])
        inputs, gates = tensors.linear(first), tensors.linear(second)
    if names.low_rank:
        outputs, decays = names.low_rank
        num_decays = config.num_value_heads * config.num_decays
        inputs = _extended(inputs, tensors, outputs, config, config.num_values, keeps_dtype=False)
        gates = _extended(gates, tensors, decays, config, num_decays, keeps_dtype=True)
    own = rule.load(config, gates, _RuleTensors(config, tensors))
    return RecurrentWeights(inputs, own, Stack([names.output], [hidden], config.num_values))


def _extended(
    linear: Linear,
    tensors: LayerTensors,
    pair: tuple[str, str],
    config: RecurrentConfig,
    num_rows: int,
    *,
    keeps_dtype: bool,
) -> Linear:
    """Add the rows of two matrices that are multiplied in turn."""
    rank = config.value_dim
    down = Stack([pair[0]], [rank], tensors.config.hidden_size, keeps_dtype=keeps_dtype)
    up = Stack([pair[1]], [num_rows], rank, keeps_dtype=keeps_dtype)
    return ExtendedLinear(linear, tensors.linear(down), tensors.linear(up))


def _channel_parts(config: RecurrentConfig) -> list[int]:
    return [config.num_keys, config.num_keys, config.num_values]


@dataclass(frozen=True, slots=True)
class _RuleTensors:
    """Implements `RuleTensors` under the names that the family has for them."""

    config: RecurrentConfig
    tensors: LayerTensors

    def vector(self, name: str, *shape: int) -> Tensor:
        stored, (rows, *others) = self.tensors.names.recurrent.stored(name), shape
        sizes = [rows] if len(stored) == 1 else _channel_parts(self.config)
        parts = zip(stored, sizes, strict=True)
        return torch.cat([self.tensors.vector(each, size, *others) for each, size in parts])

    def gated_norm(self, size: int) -> Norm:
        [name] = self.tensors.names.recurrent.stored("norm.weight")
        full = self.tensors.full(name)
        return self.tensors.loader.gated_norm(full, size, self.config.norm_epsilon)
