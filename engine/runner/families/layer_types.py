"""Rules that say which layers have a window, a chunk, or no experts."""

from __future__ import annotations

from collections.abc import Sequence

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import CHUNKED, FULL, LINEAR, SLIDING, LayerTypes

DENSE, SPARSE = "dense", "sparse"  # of `mlp_layer_types`


def full_everywhere(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """No layer has a window. Raises ModelError if the configuration lists others."""
    if raw.has("layer_types") and set(_listed(raw, num_layers)) != {FULL}:
        raise raw.wrong("layer_types", f"must list {FULL} alone")
    return (FULL,) * num_layers


def window_everywhere(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """All layers have the window of `sliding_window`, if it is set, or those that are listed."""
    if raw.has("layer_types"):
        return _listed(raw, num_layers)
    return (SLIDING if raw.has("sliding_window") else FULL,) * num_layers


def window_if_used(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """All layers have a window, if `use_sliding_window` is set (Qwen3-MoE)."""
    return (SLIDING if _uses_window(raw) else FULL,) * num_layers


def window_from_layer(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers from `max_window_layers` on have a window, if `use_sliding_window` is set."""
    first = int(raw.number("max_window_layers", 28))
    return _window_where(raw, [layer >= first for layer in range(num_layers)])


def window_alternating(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Every other layer before `max_window_layers` has a window, if it is used (Qwen2-MoE)."""
    last = int(raw.number("max_window_layers", 28))
    return _window_where(raw, [not layer % 2 and layer < last for layer in range(num_layers)])


def window_without_rope(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers without RoPE have a window, if `use_sliding_window` is set (SmolLM3)."""
    lacks_rope = layers_without_rope(raw, num_layers)
    return _window_where(raw, [layer in lacks_rope for layer in range(num_layers)])


def layers_without_rope(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without RoPE by `no_rope_layers`, where a 0 means none, or by their interval."""
    if not raw.get("no_rope_layers"):
        interval = raw.positive_int("no_rope_layer_interval", 4)
        return frozenset(range(interval - 1, num_layers, interval))
    flags = raw.numbers("no_rope_layers")
    if len(flags) != num_layers:
        raise raw.wrong("no_rope_layers", f"must list {num_layers} numbers")
    return frozenset(layer for layer, has_rope in enumerate(flags) if not has_rope)


def all_without_rope(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """No layer has RoPE unless `position_embedding_type` names it."""
    kind = raw.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise raw.wrong("position_embedding_type", "must be 'rope' or 'nope'")
    return frozenset() if kind == "rope" else frozenset(range(num_layers))


def all_without_theta(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """No layer has RoPE if its base is null (OLMo Hybrid)."""
    fields = raw.inner("rope_parameters") if raw.has("rope_parameters") else raw
    is_null = "rope_theta" in fields.names() and not fields.has("rope_theta")
    return frozenset(range(num_layers)) if is_null else frozenset()


def full_every(period: int) -> LayerTypes:
    """One layer of each `period` attends to everything, the others have a window."""

    def types(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
        if raw.has("layer_types"):
            return _listed(raw, num_layers)
        every = raw.positive_int("sliding_window_pattern", period)
        return tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers))

    return types


def full_every_fourth(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """All layers but each fourth have a window, if `sliding_window` is set (EXAONE 4)."""
    if raw.has("sliding_window") or raw.has("layer_types"):
        return full_every(4)(raw, num_layers)
    return (FULL,) * num_layers


def full_without_rope(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without a window have no RoPE, if `sliding_window` is set (EXAONE 4)."""
    if not raw.has("sliding_window"):
        return frozenset()
    types = full_every_fourth(raw, num_layers)
    return frozenset(layer for layer, kind in enumerate(types) if kind == FULL)


def chunks_with_rope(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers with RoPE attend within chunks (Llama 4)."""
    if raw.has("layer_types"):
        return _listed(raw, num_layers)
    if not raw.has("attention_chunk_size"):
        return (FULL,) * num_layers
    lacks_rope = layers_without_rope(raw, num_layers)
    return tuple(FULL if layer in lacks_rope else CHUNKED for layer in range(num_layers))


def linear_between_full(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """One layer of each `full_attention_interval` has attention, the others linear attention."""
    if raw.has("layer_types"):
        types = _listed(raw, num_layers, (FULL, LINEAR))
    else:
        every = raw.positive_int("full_attention_interval", 4)
        types = tuple(LINEAR if (i + 1) % every else FULL for i in range(num_layers))
    return _with_full(raw, types)


def linear_where_listed(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers have attention or a recurrent state by `layer_types` (Granite 4)."""
    types = raw.get("layer_types")
    if isinstance(types, list):  # before transformers 5 with other names
        old_names = {"mamba": LINEAR, "attention": FULL}
        raw = raw.with_fields({"layer_types": [old_names.get(str(each), each) for each in types]})
    return _with_full(raw, _listed(raw, num_layers, (FULL, LINEAR)))


def linear_outside_indices(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """Layers have attention if `attn_layer_indices` lists them (Bamba)."""
    listed = raw.numbers("attn_layer_indices")
    types = tuple(FULL if layer in listed else LINEAR for layer in range(num_layers))
    return _with_full(raw, types, "attn_layer_indices")


def dense_of_step(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without experts by `decoder_sparse_step` and `mlp_only_layers`."""
    step = raw.positive_int("decoder_sparse_step", 1)
    listed = raw.numbers("mlp_only_layers") if raw.has("mlp_only_layers") else ()
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step)


def dense_everywhere(_: JsonFields, num_layers: int) -> frozenset[int]:
    """All layers have a dense MLP, with or without experts beside it (Gemma 4)."""
    return frozenset(range(num_layers))


def dense_without_experts(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """All layers have no experts if `num_local_experts` is 0 (Granite 4)."""
    return frozenset(range(num_layers)) if raw.get("num_local_experts") == 0 else frozenset()


def dense_at_first(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """The first `first_k_dense_replace` layers have no experts."""
    return frozenset(range(min(int(raw.number("first_k_dense_replace", 1)), num_layers)))


def dense_where_listed(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without experts by `mlp_layer_types` (GLM-4.7-Flash)."""
    if not raw.has("mlp_layer_types"):
        return dense_at_first(raw, num_layers)
    types = _listed(raw, num_layers, (DENSE, SPARSE), "mlp_layer_types")
    return frozenset(layer for layer, kind in enumerate(types) if kind == DENSE)


def dense_outside_range(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without experts by `moe_layer_start_index`, its end and interval (ERNIE 4.5)."""
    first, last = (
        int(raw.number(f"moe_layer_{name}_index", default))
        for name, default in (("start", 1), ("end", -1))
    )
    last = num_layers - 1 if last == -1 else last
    step = raw.positive_int("moe_layer_interval", 1)
    return frozenset(i for i in range(num_layers) if not first <= i <= last or (i + 1) % step)


def dense_outside_listed(raw: JsonFields, num_layers: int) -> frozenset[int]:
    """Layers without experts by `moe_layers` or `interleave_moe_layer_step` (Llama 4)."""
    if raw.has("moe_layers"):
        listed = raw.numbers("moe_layers")
        return frozenset(i for i in range(num_layers) if i not in listed)
    step = raw.positive_int("interleave_moe_layer_step", 1)
    return frozenset(i for i in range(num_layers) if (i + 1) % step)


def _uses_window(raw: JsonFields) -> bool:
    return raw.flag("use_sliding_window", False) and raw.has("sliding_window")


def _window_where(raw: JsonFields, has_window: Sequence[bool]) -> tuple[str, ...]:
    """Return the types of the layers, if windows are used. A list of types takes precedence."""
    if not _uses_window(raw):
        return (FULL,) * len(has_window)
    if raw.has("layer_types"):
        return _listed(raw, len(has_window))
    return tuple(SLIDING if has else FULL for has in has_window)


def _with_full(
    raw: JsonFields, types: tuple[str, ...], name: str = "full_attention_interval"
) -> tuple[str, ...]:
    if FULL not in types:
        name = "layer_types" if raw.has("layer_types") else name
        raise raw.wrong(name, f"must leave at least one layer with {FULL}")
    return types


def _listed(
    raw: JsonFields,
    num_layers: int,
    known: tuple[str, ...] = (FULL, SLIDING, CHUNKED),
    name: str = "layer_types",
) -> tuple[str, ...]:
    types = raw.get(name)
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(t not in known for t in types)
    ):
        raise raw.wrong(name, f"must list {num_layers} of {', '.join(known)}")
    return tuple(map(str, types))
