"""Loads a decoder from weight files, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from baton.checkpoint.checkpoint import Tensors
from baton.core.errors import ModelError
from baton.engine.kv_cache.groups import LayerPlace
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.model.config import LayerConfig, ModelConfig, MoeConfig, QkNorm
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layer_weights import (
    AnyMlp,
    LatentProjections,
    Laurel,
    Layer,
    ParallelMoe,
    PerLayerWeights,
)
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import Linear, Mlp, Moe, Router, SparseGate
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.per_layer import PerLayerInputs, extend_layers
from baton.engine.runner.model.rank_group import DividedVocabulary, RankGroup, SummedLinear
from baton.engine.runner.model.rope import head_order, repeat_order
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.weights.altup_loading import stream_layers
from baton.engine.runner.weights.latent_loading import LatentLoader
from baton.engine.runner.weights.recurrent_loading import load_recurrent
from baton.engine.runner.weights.row_orders import joined_order
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader
from baton.engine.runner.weights.tensor_names import CLASSIFIER, TensorMap, check_tensors

AdaptLayers = Callable[
    [ModelConfig, Sequence[Layer], Sequence[DecoderLayer]], Sequence[DecoderLayer]
]


def load_decoder(
    config: ModelConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
    adapt: AdaptLayers | None = None,
    tensors: TensorMap | None = None,
) -> Decoder:
    """Check all tensors before the first one is read, then copy each to its place once.

    `adapt` returns layers that adapters can change. `tensors` are those of checked files.
    """
    if tensors is None:
        check_tensors(config, files)
        tensors = TensorMap(config, files.shapes())
    loader = TensorLoader(
        tensors.shapes(),
        files,
        target,
        on_progress,
        norm=config.norm,
        quantization=config.quantization,
        loaded_elsewhere=tensors.names.sinks,  # with the attention
        row_scales=tensors.row_scales(),
    )
    group = target.group
    embedding = _vocabulary(loader, tensors.embedding, target)
    layers = [load_layer(tensors, loader, index, group) for index in range(config.num_layers)]
    norm = loader.norm(f"{tensors.prefix}{tensors.names.norm}")
    head = embedding
    if not config.ties_embeddings:
        head = _vocabulary(loader, tensors.head, target)
    parts = target.parts
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    made = parts.make_layers(config, layers)
    if adapt is not None:
        made = adapt(config, layers, made)
    if config.altup is None:
        made = extend_layers(config, parts.ops, layers, made)
    else:
        made = stream_layers(config.altup, tensors, loader, parts.ops, layers, made)
    waits = any(list(map(parts.waits_for_experts, mixtures)))  # of all: this joins the experts
    # The kernels of GPUs are those of experts with gates.
    waits = waits or (bool(mixtures) and not config.activation.is_gated)
    classifier = None
    if config.label_tokens is not None:
        classifier = _label_row(files, tensors, config.label_tokens).to(target.device)
    elif config.num_labels:
        classifier = loader.vector(f"{CLASSIFIER}.weight")
    per_layer = _load_per_layer_inputs(config, tensors, loader, parts.ops)
    return Decoder(config, parts.ops, embedding, made, norm, head, waits, classifier, per_layer)


def _vocabulary(loader: TensorLoader, name: str, target: LoadTarget) -> Linear:
    """Load the embedding or LM head, of which each rank has some rows."""
    part = loader.embedding(name)
    if target.group is None:
        return part
    return DividedVocabulary(part, target.vocab_size, target.group)


def _load_per_layer_inputs(
    config: ModelConfig, tensors: TensorMap, loader: TensorLoader, ops: Ops
) -> PerLayerInputs | None:
    if config.per_layer is None:
        return None
    names = tensors.names.per_layer
    embedding, projection, norm = (
        f"{tensors.prefix}{name}" for name in (names.embedding, names.projection, names.norm)
    )
    return PerLayerInputs(
        ops,
        config.num_layers,
        loader.rows(embedding),
        loader.linear([projection], has_bias=False),
        loader.norm(norm),
        config.per_layer.placeholder_id,
        None if config.per_layer.has_every_token else config.per_layer.vocab_size,
    )


def _label_row(files: Tensors, tensors: TensorMap, tokens: tuple[int, int]) -> torch.Tensor:
    """Return the classifier whose logit is that of the second token less that of the first one."""
    head, embedding = f"{tensors.head}.weight", f"{tensors.embedding}.weight"
    name = head if head in files.shapes() else embedding
    less, more = (files.part(name, token).float() for token in tokens)
    return (more - less)[None]


def attention_of(config: ModelConfig, files: Tensors, device: torch.device) -> list[LayerAttention]:
    """Return the attention of each layer that has it, with its sinks."""
    tensors, layers = TensorMap(config, files.shapes()), []
    for place, index in zip(config.kv_places(), config.attention_layers, strict=True):
        layer = layer_attention(config, index, place)
        if config.has_sinks:
            name = tensors.in_layer(index, tensors.names.sinks)
            layer = replace(layer, sinks=files.tensor(name).float().to(device))
        layers.append(layer)
    return layers


def layer_attention(config: ModelConfig, index: int, place: LayerPlace) -> LayerAttention:
    """Return the attention of a layer, without sinks."""
    layer = config.layers[index]
    return LayerAttention(
        config.attention_scale,
        layer.window,
        layer.chunk,
        config.attention_softcap,
        None,
        place.group,
        place.place,
        value_dim=None if config.latent is None else config.latent.rank,
        kv_heads=layer.kv_heads,
        sees_whole_pictures=layer.sees_whole_pictures,
    )


def load_layer(
    tensors: TensorMap, loader: TensorLoader, index: int, group: RankGroup | None = None
) -> Layer:
    return _LayerLoader(tensors, loader, index, group).load()


class _LayerLoader:
    """Loads one layer."""

    def __init__(
        self, tensors: TensorMap, loader: TensorLoader, index: int, group: RankGroup | None
    ) -> None:
        self._group = group
        self._tensors = tensors
        self._names = tensors.names.of_layer(tensors.config.layers[index])
        self._config = tensors.config.of_layer(index)
        self._loader = loader
        self._index = index
        self._order = head_order(self._config)

    def load(self) -> Layer:
        names, config = self._names, self._config
        layer = config.layers[self._index]
        recurrent, output = None, names.output
        mlp_norms = names.mlp_norm, names.mlp_output_norm
        mlp_norm, mlp_output_norm = mlp_norms if layer.has_mlp else ("", "")
        if layer.is_recurrent and config.recurrent is not None:
            loaded = load_recurrent(config.recurrent, self._tensors, self._loader, self._index)
            qkv, recurrent, output = loaded
            q_norm, k_norm, latent = None, None, None
        else:
            qkv, q_norm, k_norm, latent = self._attention()
        whole = Layer(
            input_norm=self._norm(names.input_norm),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._summed(
                self._own_columns(
                    output, config.has_output_bias and recurrent is None, is_sensitive=False
                )
            ),
            attention_norm=self._norm(names.attention_norm),
            mlp_norm=self._norm("" if layer.has_parallel_experts else mlp_norm),
            mlp=self._any_mlp(layer) if layer.has_mlp else None,
            mlp_output_norm=self._norm(mlp_output_norm),
            latent=latent,
            recurrent=recurrent,
            v_norm=self._loader.unweighted_norm(config.head_dim) if config.norms_values else None,
            per_layer=self._per_layer(),
            laurel=None if config.altup is None else self._laurel(),
            scale=self._scale(),
        )
        return self._with_state(whole) if layer.has_parallel_state else whole

    def _with_state(self, layer: Layer) -> Layer:
        """Add a recurrent rule beside the layer's attention."""
        config = self._config
        assert config.recurrent is not None
        inputs, rule, name = load_recurrent(
            config.recurrent, self._tensors, self._loader, self._index
        )
        num_columns = config.num_heads * config.head_dim
        output = self._loader.split_columns(layer.output, self._linear([name], False), num_columns)
        return replace(layer, output=output, recurrent=rule, state_inputs=inputs)

    def _per_layer(self) -> PerLayerWeights | None:
        if self._config.per_layer is None:
            return None
        names = self._names.per_layer
        gate, projection = ([each] for each in (names.layer_gate, names.layer_projection))
        norm = self._tensors.in_layer(self._index, names.layer_norm)
        return PerLayerWeights(
            self._linear(gate, False), self._linear(projection, False), self._loader.norm(norm)
        )

    def _laurel(self) -> Laurel:
        names = self._names.altup
        left, right = (self._linear([name], False) for name in names.laurel)
        norm = self._tensors.in_layer(self._index, names.laurel_norm)
        return Laurel(left, right, self._loader.norm(norm))

    def _scale(self) -> float:
        if not self._config.has_layer_scale:
            return 1.0
        name = self._tensors.in_layer(self._index, self._names.layer_scale)
        return float(self._loader.vector(name))

    def _attention(self) -> tuple[Linear, Norm | None, Norm | None, LatentProjections | None]:
        names, config = self._names, self._config
        if config.latent is not None:
            return LatentLoader(config.latent, self._tensors, self._loader, self._index).load()
        qkv, order = self._tensors.qkv(self._index), joined_order(config)
        reads = config.layers[self._index].kv_layer is not None
        return (
            self._linear(qkv, config.has_qkv_bias, order, is_sensitive=True),
            self._qk_norm(names.q_norm, config.num_heads),
            None if reads else self._qk_norm(names.k_norm, config.num_kv_heads),
            None,
        )

    def _norm(self, name: str) -> Norm | None:
        return self._loader.norm(self._tensors.in_layer(self._index, name)) if name else None

    def _qk_norm(self, name: str, num_heads: int) -> Norm | None:
        kind, head_dim = self._config.layers[self._index].qk_norm, self._config.head_dim
        if kind is QkNorm.NONE:
            return None
        if kind is QkNorm.UNWEIGHTED:
            return self._loader.unweighted_norm(head_dim)
        count = num_heads if kind is QkNorm.ALL_HEADS else 1
        order = None if self._order is None else repeat_order(self._order, count)
        norm = self._loader.norm(self._tensors.in_layer(self._index, name), order)
        return replace(norm, group=self._group) if kind is QkNorm.ALL_HEADS else norm

    def _linear(
        self,
        names: Sequence[str],
        has_bias: bool,
        order: Sequence[int] | None = None,
        *,
        is_sensitive: bool = False,
    ) -> Linear:
        names = self._tensors.in_layers(self._index, names)
        return self._loader.linear(names, has_bias, order, is_sensitive=is_sensitive)

    def _any_mlp(self, layer: LayerConfig) -> AnyMlp:
        if layer.has_parallel_experts:
            return self._parallel_moe()
        if not layer.mlp_size:
            return self._moe()
        mlp, deviations = self._mlp(self._names.gate_up, self._names.down), layer.gate_deviations
        if deviations is None:
            return mlp
        num_gates, add_up = layer.mlp_size, None
        if self._group is not None:
            num_gates, add_up = num_gates * self._group.shard.size, self._group.all_reduce
        return replace(mlp, gate_up=SparseGate(mlp.gate_up, num_gates, deviations, add_up))

    def _parallel_moe(self) -> ParallelMoe:
        names, loader, moe = self._names.parallel, self._loader, self._moe()
        router_scale, expert_scales, dense_norm, dense_output_norm, norm, output_norm = (
            self._tensors.in_layer(self._index, name)
            for name in (
                names.router_scale,
                names.expert_scales,
                self._names.mlp_norm,
                names.dense_output_norm,
                names.experts_norm,
                names.experts_output_norm,
            )
        )
        size = self._config.hidden_size
        weight = moe.router.weight * loader.vector(router_scale) * size**-0.5
        return ParallelMoe(
            self._own_mlp(self._names.gate_up, self._names.down),
            loader.norm(dense_norm),
            loader.norm(dense_output_norm),
            replace(moe, router=replace(moe.router, weight=weight)),
            loader.unweighted_norm(size),
            loader.norm(norm),
            loader.norm(output_norm),
            loader.vector(expert_scales),
        )

    def _mlp(self, gate_up: Sequence[str], down: str) -> Mlp:
        own = self._own_mlp(gate_up, down)
        return replace(own, down=self._summed(own.down))

    def _own_mlp(self, gate_up: Sequence[str], down: str) -> Mlp:
        """Load the rank's part of an MLP."""
        has_bias = self._config.has_mlp_bias
        return Mlp(self._linear(gate_up, has_bias), self._own_columns(down, has_bias))

    def _own_columns(self, name: str, has_bias: bool, *, is_sensitive: bool = True) -> Linear:
        """Load a linear layer of which each rank has some columns, and the first one the bias."""
        return self._linear([name], has_bias and self._is_first, is_sensitive=is_sensitive)

    def _summed(self, part: Linear) -> Linear:
        return part if self._group is None else SummedLinear(part, self._group)

    @property
    def _is_first(self) -> bool:
        return self._group is None or self._group.shard.rank == 0

    def _moe(self) -> Moe:
        moe, names = self._config.moe, self._names.experts
        if moe is None or names is None:
            raise ModelError(f"{self._config.architecture}: no experts are configured")
        shared, shared_gate = None, None
        if moe.shared_size:
            gate_up = [f"{names.shared}.{name}" for name in names.shared_gate_up]
            shared = self._own_mlp(gate_up, f"{names.shared}.{names.shared_down}")
        if moe.has_shared_gate:
            shared_gate = self._linear([names.shared_gate], False)
        latent = None
        if moe.latent_size is not None:
            into, out = ([name] for name in names.latent)
            latent = self._linear(into, False), self._linear(out, False)
        experts = [self._expert(moe, names, expert) for expert in moe.loaded_experts]
        router, add_up = self._router(moe, names), self._group.all_reduce if self._group else None
        return Moe(moe, router, experts, shared, shared_gate, latent, add_up=add_up)

    def _router(self, moe: MoeConfig, names: ExpertNames) -> Router:
        router = self._tensors.in_layer(self._index, names.router)
        correction = self._tensors.in_layer(self._index, names.correction_bias)
        return Router(
            moe,
            self._loader.vector(f"{router}.weight"),
            self._loader.vector(f"{router}.bias") if moe.has_bias else None,
            self._loader.vector(correction).flatten() if moe.has_correction_bias else None,
        )

    def _expert(self, moe: MoeConfig, names: ExpertNames, expert: int) -> Mlp:
        has_bias = moe.has_bias
        has_down_bias = has_bias and (self._is_first or bool(moe.own_experts))
        if "{expert}" in names.down:
            gate_up = [name.format(expert=expert) for name in names.gate_up]
            down = names.down.format(expert=expert)
            return Mlp(
                self._linear(gate_up, has_bias),
                self._linear([down], has_down_bias, is_sensitive=True),
            )
        gate_up_name, down_name = (
            self._tensors.in_layer(self._index, name) for name in (names.gate_up[0], names.down)
        )
        place, read = expert - moe.loaded_experts.start, self._loader.expert_linear
        return Mlp(
            read(gate_up_name, place, names, has_bias, is_gate_up=True),
            read(down_name, place, names, has_down_bias, is_gate_up=False),
        )
