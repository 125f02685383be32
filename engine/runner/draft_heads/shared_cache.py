"""KV cache of a model that has the layers of another one as well, which drafts."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.kv_cache.groups import KvHeads
from baton.engine.runner.model.config import LayerConfig, ModelConfig


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
