"""The target of a draft head: dtype and quantization of its weights, a shared KV cache."""

from __future__ import annotations

from dataclasses import replace

from baton.checkpoint.checkpoint import Tensors
from baton.engine.kv_cache.groups import KvHeads
from baton.engine.runner.model.config import LayerConfig, ModelConfig
from baton.engine.runner.weights.packing_key import are_quantized
from baton.engine.runner.weights.tensor_loading import LoadTarget


def quantized_with(model_files: Tensors, target: LoadTarget) -> LoadTarget:
    """Return the target for a head: 8 bits on CPUs if the model itself has few, or its own dtype.

    Weights in bfloat16 would take much of a draft's time beside such a model. 4 bits cost drafts.
    """
    has_few = target.quantize != "none" or are_quantized(model_files.identities(), model_files)
    quantize = "int8" if has_few and target.parts.packer is not None else "none"
    return replace(target, quantize=quantize, cached=None, importance={})


def share_cache(own: ModelConfig, target: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Return a model as a part of the target's cache, and the target with the layers of both."""
    first, num_before = target.num_layers, len(target.attention_layers)
    added = [
        replace(layer, kv_layer=None if layer.kv_layer is None else first + layer.kv_layer)
        for layer in _with_heads(own)
    ]
    extended = replace(target, layers=(*_with_heads(target), *added))
    if len({layer.kv_heads for layer in extended.layers}) == 1:  # as without any of their own
        extended = replace(target, layers=(*target.layers, *own.layers))
    layers = tuple(
        replace(layer, kv_heads=shared.kv_heads)
        for layer, shared in zip(own.layers, extended.layers[first:], strict=True)
    )
    places = extended.kv_places()[num_before:]
    return replace(own, layers=layers, cache_places=places, num_before=num_before), extended


def _with_heads(config: ModelConfig) -> list[LayerConfig]:
    own = KvHeads(config.num_kv_heads, config.head_dim)
    return [replace(layer, kv_heads=layer.kv_heads or own) for layer in config.layers]
