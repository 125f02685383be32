"""Rules that say which layers have a window, a chunk, or no experts."""

from __future__ import annotations

from engine.model_folder import JsonFields
from engine.runner.families.family import CHUNKED, FULL, SLIDING, LayerTypes


def window_everywhere(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """All layers have the window of `sliding_window`, if it is set."""
    return (SLIDING if raw.has("sliding_window") else FULL,) * num_layers


def window_from_layer(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers from `max_window_layers` on have a window, if `use_sliding_window` is set."""
    if not raw.flag("use_sliding_window", False) or not raw.has("sliding_window"):
        return (FULL,) * num_layers
    if raw.has("layer_types"):
        return _listed(raw, num_layers)
    first = int(raw.number("max_window_layers", 28))
    return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))


def full_every(period: int) -> LayerTypes:
    """One layer of each `period` attends to everything, the others have a window."""

    def types(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
        if raw.has("layer_types"):
            return _listed(raw, num_layers)
        every = raw.positive_int("sliding_window_pattern", period)
        return tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers))

    return types


def chunks_with_rope(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers with RoPE attend within chunks (Llama 4)."""
    if raw.has("layer_types"):
        return _listed(raw, num_layers)
    if not raw.has("attention_chunk_size"):
        return (FULL,) * num_layers
    if raw.get("no_rope_layers"):
        return tuple(CHUNKED if has else FULL for has in raw.numbers("no_rope_layers"))
    every = raw.positive_int("no_rope_layer_interval", 4)
    return tuple(FULL if (i + 1) % every == 0 else CHUNKED for i in range(num_layers))


def dense_of_step(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without experts by `decoder_sparse_step` and `mlp_only_layers`."""
    step = raw.positive_int("decoder_sparse_step", 1)
    listed = raw.numbers("mlp_only_layers") if raw.has("mlp_only_layers") else ()
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step)


def dense_at_first(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """The first `first_k_dense_replace` layers have no experts."""
    return frozenset(range(min(int(raw.number("first_k_dense_replace", 0)), num_layers)))


def dense_outside_listed(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without experts by `moe_layers` or `interleave_moe_layer_step` (Llama 4)."""
    if raw.has("moe_layers"):
        listed = raw.numbers("moe_layers")
        return frozenset(i for i in range(num_layers) if i not in listed)
    step = raw.positive_int("interleave_moe_layer_step", 1)
    return frozenset(i for i in range(num_layers) if (i + 1) % step)


def _listed(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    known, types = (FULL, SLIDING, CHUNKED), raw.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise raw.wrong("layer_types", f"must list {num_layers} of {', '.join(known)}")
    return tuple(map(str, types))
