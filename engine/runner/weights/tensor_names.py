"""Names and shapes of the tensors that a model folder must contain."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.runner.model.config import ModelConfig
from engine.runner.weights.packed import is_packed, packed_parts
from engine.runner.weights.safetensors import FLOATS, WHOLE, Expected, Shape, WeightFiles


def check_tensors(config: ModelConfig, files: WeightFiles) -> None:
    """Raise ModelError unless the files hold every tensor in its shape, and no other."""
    files.check(_stored_tensors(config, files.names()), _ignored(config))


def _stored_tensors(config: ModelConfig, names: Collection[str]) -> dict[str, Expected]:
    """Return the tensors as stored: a quantized matrix consists of several parts."""
    stored = {}
    for name, shape in expected_tensors(config).items():
        linear, how = name.removesuffix(".weight"), config.quantization
        if how is not None and is_packed(linear, names, how):
            for part in packed_parts(linear, shape, names, how):
                stored[part.name] = Expected(part.shape, WHOLE if part.is_whole else FLOATS)
        else:
            stored[name] = Expected(shape, FLOATS)
    return stored


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
    """Return redundant tensors of some checkpoints: tied heads and rotary buffers."""
    buffers = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)]
    return frozenset(["lm_head.weight", "model.rotary_emb.inv_freq", *buffers])
