"""Decoder layers that adapters can change. Passes without adapters use the layers as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from baton.engine.runner.adapters.adapted_experts import AdaptedExperts
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.model.adapters import Place
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import AnyMlp, LatentProjections, Layer, ParallelMoe
from baton.engine.runner.model.layers import DecoderLayer, LayerInput, gate_of, unfused_layers
from baton.engine.runner.model.linear import HeadLinears, Linear, Mlp, Moe, SparseGate
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import MlpGate, Ops
from baton.engine.runner.model.rank_group import SummedLinear


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """Implements `Linear`: the base's output, and what the tokens' adapters add to it."""

    base: Linear
    place: Place
    active: ActiveAdapters

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.active.add(self.place, hidden_states, self.base(hidden_states))

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.base.rows(row_ids)


@dataclass(frozen=True, slots=True)
class AdaptedHeads:
    """Implements `HeadLinears`."""

    base: HeadLinears
    layer: int
    name: str  # of the places, whose indices are heads
    active: ActiveAdapters

    def __call__(self, heads: Tensor) -> Tensor:
        products, groups = self.active.products, self.active.groups
        return products.add_to_heads(self.layer, self.name, groups, heads, self.base(heads))


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """Implements `DecoderLayer` by the layer itself, or by one with adapted linear layers."""

    adds_low_rank: ClassVar[bool] = True
    extends_output: ClassVar[bool] = False
    plain: DecoderLayer
    adapted: DecoderLayer
    active: ActiveAdapters

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        if forward_pass.groups is None:
            return self.plain.forward(forward_pass, inputs, ends)
        self.active.groups = forward_pass.groups
        # The groups are those of all tokens.
        outputs = self.adapted.forward(forward_pass, inputs, None)
        return outputs if ends is None else LayerInput(outputs.hidden_states[ends.indices])

    def joined(self, after: DecoderLayer) -> None:
        return None


def adaptable_layers(
    ops: Ops,
    active: ActiveAdapters,
    config: ModelConfig,
    layers: Sequence[Layer],
    plain: Sequence[DecoderLayer],
) -> Sequence[DecoderLayer]:
    """Return the layers `plain`, which can be changed by adapters from now on."""
    adapt = _Adapting(ops, gate_of(config), active)
    adapted = unfused_layers(
        ops, config, [adapt.layer(layer, index) for index, layer in enumerate(layers)]
    )
    return [
        own if own.adds_low_rank else AdaptableLayer(own, other, active)
        for own, other in zip(plain, adapted, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Adapting:
    """Makes layers from others that add products of adapters."""

    ops: Ops
    gate: MlpGate
    active: ActiveAdapters

    def layer(self, layer: Layer, index: int) -> Layer:
        recurrent, latent = layer.recurrent, layer.latent
        if recurrent is not None:
            recurrent = replace(recurrent, gates=self._linear(recurrent.gates, index, "gates"))
        if latent is not None:
            query = latent.query
            latent = LatentProjections(
                None if query is None else self._linear(query, index, "query_up"),
                AdaptedHeads(latent.key, index, "key", self.active),
                AdaptedHeads(latent.value, index, "value", self.active),
            )
        return replace(
            layer,
            qkv=self._linear(layer.qkv, index, "qkv"),
            output=self._linear(layer.output, index, "output"),
            mlp=self._any_mlp(layer.mlp, index),
            latent=latent,
            recurrent=recurrent,
        )

    def _any_mlp(self, mlp: AnyMlp | None, index: int) -> AnyMlp | None:
        if mlp is None:
            return None
        if isinstance(mlp, Moe):
            return self._mixture(mlp, index)
        if isinstance(mlp, ParallelMoe):
            return replace(mlp, dense=self._mlp(mlp.dense, index))
        return self._mlp(mlp, index)

    def _mixture(self, moe: Moe, index: int) -> Moe:
        shared, shared_gate = moe.shared, moe.shared_gate
        self.active.routers[index] = moe.router
        return replace(
            moe,
            shared=None if shared is None else self._mlp(shared, index, "shared_"),
            shared_gate=None
            if shared_gate is None
            else self._linear(shared_gate, index, "shared_gate"),
            mixer=AdaptedExperts(moe, index, self.ops, self.gate, self.active),
        )

    def _mlp(self, mlp: Mlp, index: int, prefix: str = "") -> Mlp:
        gate_up, name = mlp.gate_up, f"{prefix}gate_up"
        if isinstance(gate_up, SparseGate):
            gate_up = replace(gate_up, gate_up=self._linear(gate_up.gate_up, index, name))
        else:
            gate_up = self._linear(gate_up, index, name)
        return Mlp(gate_up, self._linear(mlp.down, index, f"{prefix}down"))

    def _linear(self, linear: Linear, index: int, name: str) -> Linear:
        if isinstance(linear, SummedLinear):  # each rank adds the product of its columns
            return replace(linear, part=self._linear(linear.part, index, name))
        return AdaptedLinear(linear, Place(index, name), self.active)
