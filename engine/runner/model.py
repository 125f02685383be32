"""The decoder family: Llama, Mistral, Qwen2 and Qwen3 differ in a few switches only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runner.attention import AttentionPass
from engine.runner.config import ModelConfig
from engine.runner.facts import LoadProgress as LoadProgress
from engine.runner.facts import OnLoad, PassHook
from engine.runner.ops import Angles, Linear, Ops
from engine.runner.weights import Shape, WeightFiles


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear  # rows of queries, then keys, then values
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """The weights and the pass over them; holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Linear,
        layers: list[Layer],
        norm: Tensor,
        head: Linear,
    ) -> None:
        self._config = config
        self._ops = ops
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def forward(
        self,
        token_ids: Tensor,
        angles: Angles,
        attention: AttentionPass,
        hook: PassHook | None,
    ) -> Tensor:
        """[tokens] → [tokens, hidden_size], normed and ready for `logits`."""
        states = self._embedding.rows(token_ids)
        for index, layer in enumerate(self._layers):
            states = states + self._attend(index, layer, states, angles, attention)
            states = states + self._transform(layer, states)
            if hook is not None:
                hook.layer_done(index)
        if hook is not None:
            hook.pass_done()
        return self._normed(states, self._norm)

    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32."""
        return self._head(states).float()

    def _attend(
        self,
        index: int,
        layer: Layer,
        states: Tensor,
        angles: Angles,
        attention: AttentionPass,
    ) -> Tensor:
        config, epsilon = self._config, self._config.rms_norm_eps
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        mixed = layer.qkv(self._normed(states, layer.input_norm))
        split = mixed.view(len(states), -1, config.head_dim).split(heads, dim=1)
        query, key, value = split
        query = self._ops.rotated(query, layer.q_norm, epsilon, angles)
        key = self._ops.rotated(key, layer.k_norm, epsilon, angles)
        return layer.output(attention.attend(index, query, key, value).flatten(1))

    def _transform(self, layer: Layer, states: Tensor) -> Tensor:
        both = layer.gate_up(self._normed(states, layer.post_norm))
        return layer.down(self._ops.gated(both))

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return self._ops.normed(states, weight, self._config.rms_norm_eps)


def load_decoder(
    config: ModelConfig,
    files: WeightFiles,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    on_progress: OnLoad | None = None,
) -> Decoder:
    """Checks every tensor before the first is read, then copies each to its place once."""
    check_tensors(config, files)
    loader = _Loader(config, files, dtype, device, ops, on_progress)
    embedding = loader.linear(["model.embed_tokens"], has_bias=False)
    layers = [_load_layer(config, loader, f"model.layers.{i}") for i in range(config.num_layers)]
    norm = loader.stacked(["model.norm.weight"], (config.hidden_size,))
    head = embedding
    if not config.ties_embeddings:
        head = loader.linear(["lm_head"], has_bias=False)
    return Decoder(config, ops, embedding, layers, norm, head)


def check_tensors(config: ModelConfig, files: WeightFiles) -> None:
    """Raises ModelError unless every tensor is there, in its shape, and no other."""
    files.check(expected_tensors(config), _ignored(config))


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.ties_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            tensors[f"model.layers.{index}.{name}"] = shape
    return tensors


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for part, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"self_attn.{part}", rows, hidden, config.has_qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, queries, config.has_output_bias)
    if config.has_qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield from _linear("mlp.gate_proj", inner, hidden, config.has_mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, config.has_mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.has_mlp_bias)


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _ignored(config: ModelConfig) -> frozenset[str]:
    """What some folders carry though it follows from config.json or from another tensor."""
    buffers = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)]
    return frozenset(["lm_head.weight", "model.rotary_emb.inv_freq", *buffers])


class _Loader:
    """Copies tensors to their final places, stacked where one product serves several."""

    def __init__(
        self,
        config: ModelConfig,
        files: WeightFiles,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        on_progress: OnLoad | None,
    ) -> None:
        self._shapes = expected_tensors(config)
        self._files = files
        self._dtype = dtype
        self._device = device
        self._ops = ops
        self._on_progress = on_progress
        self._loaded = 0
        self._total = sum(map(self._bytes_of, self._shapes))

    def stacked(self, names: list[str], shape: Shape) -> Tensor:
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        parts = whole.split([self._shapes[name][0] for name in names])
        for name, part in zip(names, parts, strict=True):
            self._files.copy_into(name, part)
            self._report(name)
        return whole

    def linear(self, names: list[str], has_bias: bool) -> Linear:
        weights = [f"{name}.weight" for name in names]
        rows = sum(self._shapes[name][0] for name in weights)
        weight = self.stacked(weights, (rows, self._shapes[weights[0]][1]))
        biases = [f"{name}.bias" for name in names]
        return self._ops.linear(weight, self.stacked(biases, (rows,)) if has_bias else None)

    def _bytes_of(self, name: str) -> int:
        return torch.Size(self._shapes[name]).numel() * self._dtype.itemsize

    def _report(self, name: str) -> None:
        self._loaded += self._bytes_of(name)
        if self._on_progress is not None:
            self._on_progress(LoadProgress(self._loaded, self._total))


def _load_layer(config: ModelConfig, loader: _Loader, at: str) -> Layer:
    hidden, head = (config.hidden_size,), (config.head_dim,)
    qk_norm = config.has_qk_norm
    qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
    return Layer(
        input_norm=loader.stacked([f"{at}.input_layernorm.weight"], hidden),
        qkv=loader.linear(qkv, config.has_qkv_bias),
        q_norm=loader.stacked([f"{at}.self_attn.q_norm.weight"], head) if qk_norm else None,
        k_norm=loader.stacked([f"{at}.self_attn.k_norm.weight"], head) if qk_norm else None,
        output=loader.linear([f"{at}.self_attn.o_proj"], config.has_output_bias),
        post_norm=loader.stacked([f"{at}.post_attention_layernorm.weight"], hidden),
        gate_up=loader.linear([f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"], config.has_mlp_bias),
        down=loader.linear([f"{at}.mlp.down_proj"], config.has_mlp_bias),
    )
