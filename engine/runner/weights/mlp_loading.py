"""Loads the MLP of a layer, its experts, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.core.errors import ModelError
from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.model.adapters import ROUTER
from baton.engine.runner.model.config import LayerConfig, MoeConfig
from baton.engine.runner.model.layer_weights import AnyMlp, ParallelMoe
from baton.engine.runner.model.linear import Mlp, Moe, Router, SparseGate
from baton.engine.runner.weights.layer_tensors import LayerTensors
from baton.engine.runner.weights.loader import Axis, Stack, expert_stacks


class MlpLoader:
    """Loads those of one layer."""

    def __init__(self, tensors: LayerTensors) -> None:
        self._tensors = tensors
        self._names = tensors.names
        self._config = tensors.config
        self._loader = tensors.loader
        self._group = tensors.group

    def load(self, layer: LayerConfig) -> AnyMlp:
        if layer.has_parallel_experts:
            return self._parallel_moe(layer)
        if not layer.mlp_size:
            return self._moe()
        own, deviations = self._own_mlp(layer), layer.gate_deviations
        mlp = replace(own, down=self._tensors.summed(own.down))
        if deviations is None:
            return mlp
        num_gates, add_up = layer.mlp_size, None
        if self._group is not None:
            num_gates, add_up = num_gates * self._group.shard.size, self._group.all_reduce
        return replace(mlp, gate_up=SparseGate(mlp.gate_up, num_gates, deviations, add_up))

    def _parallel_moe(self, layer: LayerConfig) -> ParallelMoe:
        names, tensors, moe = self._names.parallel, self._tensors, self._moe()
        size = self._config.hidden_size
        weight = moe.router.weight * tensors.vector(names.router_scale, size) * size**-0.5
        return ParallelMoe(
            self._own_mlp(layer),
            tensors.norm(self._names.mlp_norm, size),
            tensors.norm(names.dense_output_norm, size),
            replace(moe, router=replace(moe.router, weight=weight)),
            self._loader.unweighted_norm(size),
            tensors.norm(names.experts_norm, size),
            tensors.norm(names.experts_output_norm, size),
            tensors.vector(names.expert_scales, moe.config.num_experts),
        )

    def _own_mlp(self, layer: LayerConfig) -> Mlp:
        return self._mlp(self._names.gate_up, self._names.down, layer.mlp_size)

    def _mlp(self, gate_up: Sequence[str], down: str, size: int, place: str = "") -> Mlp:
        """Load the rank's part of an MLP."""
        hidden, has_bias = self._config.hidden_size, self._config.has_mlp_bias
        is_stacked = self._config.activation.is_gated and len(gate_up) == 1
        rows: list[Axis] = [(size, size) if is_stacked else size] * len(gate_up)
        tensors = self._tensors
        first = Stack(gate_up, rows, hidden, has_bias, place=tensors.place(f"{place}gate_up"))
        last = Stack([down], [hidden], size, has_bias, place=tensors.place(f"{place}down"))
        return Mlp(tensors.linear(first), tensors.own_columns(replace(last, is_sensitive=True)))

    def _moe(self) -> Moe:
        moe, names, hidden = self._config.moe, self._names.experts, self._config.hidden_size
        if moe is None or names is None:
            raise ModelError(f"{self._config.architecture}: no experts are configured")
        linear, place = self._tensors.linear, self._tensors.place
        shared, shared_gate = None, None
        if moe.shared_size:
            gate_up = [f"{names.shared}.{name}" for name in names.shared_gate_up]
            down = f"{names.shared}.{names.shared_down}"
            shared = self._mlp(gate_up, down, moe.shared_size, "shared_")
        if moe.has_shared_gate:
            shared_gate = linear(
                Stack([names.shared_gate], [1], hidden, place=place("shared_gate"))
            )
        latent = None
        if moe.latent_size is not None:
            into, out = names.latent
            latent = (
                linear(Stack([into], [moe.latent_size], hidden)),
                linear(Stack([out], [hidden], moe.latent_size)),
            )
        experts = [self._expert(moe, names, expert) for expert in moe.loaded_experts]
        router, add_up = self._router(moe, names), self._group.all_reduce if self._group else None
        return Moe(moe, router, experts, shared, shared_gate, latent, add_up=add_up)

    def _router(self, moe: MoeConfig, names: ExpertNames) -> Router:
        tensors, count = self._tensors, moe.num_experts
        router = Stack(
            [names.router], [count], self._config.hidden_size, place=tensors.place(ROUTER)
        )
        row = (1,) if names.has_correction_row else ()
        return Router(
            moe,
            tensors.wide_matrix(router),
            tensors.vector(f"{names.router}.bias", count) if moe.has_bias else None,
            tensors.vector(names.correction_bias, *row, count).flatten()
            if moe.has_correction_bias
            else None,
        )

    def _expert(self, moe: MoeConfig, names: ExpertNames, expert: int) -> Mlp:
        place, number = self._tensors.place, expert - moe.loaded_experts.start
        first, last = expert_stacks(moe, names, self._config.hidden_size, expert)
        last = replace(last, place=place("down", number))
        return Mlp(
            self._tensors.linear(replace(first, place=place("gate_up", number))),
            self._tensors.linear(last) if moe.own_experts else self._tensors.own_columns(last),
        )
