"""Loads one layer of a decoder. All that is known of its tensors is said here, once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from baton.engine.runner.model.config import LayerConfig, ModelConfig, QkNorm
from baton.engine.runner.model.layer_weights import (
    AltUpWeights,
    LatentProjections,
    Laurel,
    Layer,
    PerLayerWeights,
)
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.rank_group import RankGroup
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.rope import head_order, repeat_order
from baton.engine.runner.weights.latent_loading import load_latent
from baton.engine.runner.weights.layer_tensors import LayerTensors
from baton.engine.runner.weights.loader import Axis, Stack, WeightLoader
from baton.engine.runner.weights.mlp_loading import MlpLoader
from baton.engine.runner.weights.recurrent_loading import load_recurrent
from baton.engine.runner.weights.row_orders import joined_order
from baton.engine.runner.weights.tensor_names import TensorMap


def load_layer(
    tensors: TensorMap, loader: WeightLoader, index: int, group: RankGroup | None = None
) -> Layer:
    return _LayerLoader(LayerTensors(tensors, loader, index, group)).load()


class _Mixer(NamedTuple):
    """Attention or a recurrent rule."""

    inputs: Linear
    output: Stack
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    latent: LatentProjections | None = None
    recurrent: RecurrentRule | None = None


class _LayerLoader:
    def __init__(self, tensors: LayerTensors) -> None:
        self._tensors = tensors
        self._config: ModelConfig = tensors.config
        self._layer: LayerConfig = self._config.layers[tensors.index]
        self._names = tensors.names
        self._loader = tensors.loader

    def load(self) -> Layer:
        names, config, layer = self._names, self._config, self._layer
        mlp_norms = names.mlp_norm, names.mlp_output_norm
        mlp_norm, mlp_output_norm = mlp_norms if layer.has_mlp else ("", "")
        mixer = self._mixer()
        output = replace(mixer.output, place=self._tensors.place("output"))
        whole = Layer(
            input_norm=self._norm(names.input_norm),
            qkv=mixer.inputs,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            output=self._tensors.summed(self._tensors.own_columns(output)),
            attention_norm=self._norm(names.attention_norm),
            mlp_norm=self._norm("" if layer.has_parallel_experts else mlp_norm),
            mlp=MlpLoader(self._tensors).load(layer) if layer.has_mlp else None,
            mlp_output_norm=self._norm(mlp_output_norm),
            latent=mixer.latent,
            recurrent=mixer.recurrent,
            v_norm=self._loader.unweighted_norm(config.head_dim) if config.norms_values else None,
            per_layer=self._per_layer(),
            laurel=None if config.altup is None else self._laurel(config.altup.laurel_rank),
            altup=self._altup(),
            scale=self._scale(),
        )
        return self._with_state(whole) if layer.has_parallel_state else whole

    def _mixer(self) -> _Mixer:
        config = self._config
        if self._layer.is_recurrent and config.recurrent is not None:
            inputs, rule, output = load_recurrent(config.recurrent, self._tensors)
            return _Mixer(inputs, output, recurrent=rule)
        if config.latent is not None:
            latent = load_latent(config.latent, self._tensors)
            output = self._output(config.num_heads * config.latent.value_dim)
            return _Mixer(latent.down, output, *latent[1:])
        return self._attention()

    def _attention(self) -> _Mixer:
        names, config = self._names, self._config
        queries, keys = (each * config.head_dim for each in (config.num_heads, config.num_kv_heads))
        parts = 2 * queries if config.has_output_gate else queries, keys, keys
        qkv = self._tensors.map.qkv(self._tensors.index)
        rows: list[Axis] = [parts] if len(names.qkv) == 1 else [*parts[: len(qkv)]]
        stack = Stack(qkv, rows, config.hidden_size, config.has_qkv_bias, is_sensitive=True)
        stack = replace(stack, order=joined_order(config), place=self._tensors.place("qkv"))
        if config.has_sinks:  # loaded with the KV cache's layers
            self._loader.skip(self._tensors.full(names.sinks), config.num_heads)
        reads = self._layer.kv_layer is not None
        return _Mixer(
            self._tensors.linear(stack),
            self._output(queries),
            self._qk_norm(names.q_norm, config.num_heads),
            None if reads else self._qk_norm(names.k_norm, config.num_kv_heads),
        )

    def _output(self, columns: int) -> Stack:
        config = self._config
        has_bias = config.has_output_bias and config.latent is None
        return Stack([self._names.output], [config.hidden_size], columns, has_bias)

    def _with_state(self, layer: Layer) -> Layer:
        """Add a recurrent rule beside the layer's attention."""
        config = self._config
        assert config.recurrent is not None
        inputs, rule, stack = load_recurrent(config.recurrent, self._tensors, "state_inputs")
        num_columns = config.num_heads * config.head_dim
        second = self._tensors.linear(stack)
        output = self._loader.split_columns(layer.output, second, num_columns)
        return replace(layer, output=output, recurrent=rule, state_inputs=inputs)

    def _per_layer(self) -> PerLayerWeights | None:
        if self._config.per_layer is None:
            return None
        names, size, hidden = self._names.per_layer, self._config.per_layer.size, self._hidden
        return PerLayerWeights(
            self._tensors.linear(Stack([names.layer_gate], [size], hidden)),
            self._tensors.linear(Stack([names.layer_projection], [hidden], size)),
            self._tensors.norm(names.layer_norm, hidden),
        )

    def _laurel(self, rank: int) -> Laurel:
        names, hidden = self._names.altup, self._hidden
        left, right = names.laurel
        return Laurel(
            self._tensors.linear(Stack([left], [rank], hidden)),
            self._tensors.linear(Stack([right], [hidden], rank)),
            self._tensors.norm(names.laurel_norm, hidden),
        )

    def _altup(self) -> AltUpWeights | None:
        if self._config.altup is None:
            return None
        names, tensors, hidden = self._names.altup, self._tensors, self._hidden
        count = self._config.altup.num_streams
        prediction = Stack([names.prediction], [count**2], count, keeps_dtype=True)
        correction = Stack([names.correction], [count], count, keeps_dtype=True)
        scale = tensors.vector(names.output_scale, hidden)
        return AltUpWeights(
            tensors.linear(Stack([names.router], [count], hidden, keeps_dtype=True)),
            tensors.norm(names.router_norm, hidden),
            tensors.wide_matrix(prediction).view(count, count, count),
            tensors.wide_matrix(correction),
            scale if self._config.altup.has_output_scale else None,
        )

    @property
    def _hidden(self) -> int:
        return self._config.hidden_size

    def _scale(self) -> float:
        if not self._config.has_layer_scale:
            return 1.0
        return float(self._tensors.vector(self._names.layer_scale, 1))

    def _norm(self, name: str) -> Norm | None:
        return self._tensors.norm(name, self._hidden) if name else None

    def _qk_norm(self, name: str, num_heads: int) -> Norm | None:
        kind, head_dim = self._layer.qk_norm, self._config.head_dim
        if kind is QkNorm.NONE:
            return None
        if kind is QkNorm.UNWEIGHTED:
            return self._loader.unweighted_norm(head_dim)
        count = num_heads if kind is QkNorm.ALL_HEADS else 1
        order = head_order(self._config)
        order = None if order is None else repeat_order(order, count)
        norm = self._tensors.norm(name, count * head_dim, order)
        return replace(norm, group=self._tensors.group) if kind is QkNorm.ALL_HEADS else norm
