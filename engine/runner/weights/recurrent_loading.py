"""Loads the weights of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import ExtendedLinear, Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.weights.tensor_loading import TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap


def load_recurrent(
    config: RecurrentConfig, tensors: TensorMap, loader: TensorLoader, index: int
) -> tuple[Linear, RecurrentRule, str]:
    """Return a layer's first projection, its other weights and the name of its last projection."""
    names, rule = tensors.names.recurrent, RULES[config.rule]
    projections = tensors.in_layers(index, names.projections)
    if names.gates:
        is_joined = len(projections) == 1
        order, gate_order = rule.stored_rows(config) if is_joined else (None, None)
        projection = loader.linear(projections, False, order)
        # The gates are few, and errors of a decay add up: they keep their dtype.
        gate_names = tensors.in_layers(index, names.gates)
        gates = loader.linear(gate_names, False, gate_order, keeps_dtype=True)
    else:
        projection, gates = loader.split_linear(projections[0], *rule.stored_rows(config))
    if names.low_rank:
        outputs, decays = (tensors.in_layers(index, pair) for pair in names.low_rank)
        projection = ExtendedLinear(projection, *(loader.linear([each], False) for each in outputs))
        plain = (loader.linear([each], False, keeps_dtype=True) for each in decays)
        gates = ExtendedLinear(gates, *plain)
    own = _LayerTensors(config, tensors, loader, index)
    return projection, rule.load(config, gates, own), names.output


@dataclass(frozen=True, slots=True)
class _LayerTensors:
    """Implements `RuleTensors` under the names that the family has for them."""

    config: RecurrentConfig
    tensors: TensorMap
    loader: TensorLoader
    index: int

    def vector(self, name: str) -> Tensor:
        stored = self.tensors.in_layers(self.index, self.tensors.names.recurrent.stored(name))
        return torch.cat([self.loader.vector(each) for each in stored])

    def gated_norm(self) -> Norm:
        [name] = self.tensors.names.recurrent.stored("norm.weight")
        full = self.tensors.in_layer(self.index, name)
        return self.loader.gated_norm(full, self.config.norm_epsilon)
