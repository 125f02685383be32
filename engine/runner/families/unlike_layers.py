"""Layers of one model with unlike heads, or without keys and values of their own (Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.kv_cache.groups import KvHeads
from baton.engine.runner.families.family import FULL
from baton.engine.runner.families.layer_types import full_every
from baton.engine.runner.model.config import LayerConfig

GEMMA4_FIELDS = frozenset(
    {
        "hidden_size_per_layer_input",
        "attention_k_eq_v",
        "use_double_wide_mlp",
        "num_kv_shared_layers",
        "per_layer_config",
        "enable_moe_block",
        "num_experts",
        "use_bidirectional_attention",
    }
)


def gemma4_types(raw: JsonFields, num_layers: int) -> tuple[str, ...]:
    """One layer of each six, and the last one, attends to everything, the others have a window."""
    return (*full_every(6)(raw, num_layers)[:-1], FULL)


def gemma4_layers(
    fields: JsonFields, types: Sequence[str], layers: Sequence[LayerConfig]
) -> tuple[LayerConfig, ...]:
    """Give layers their own heads, and the last ones the keys and values of earlier layers."""
    sight = fields.get("use_bidirectional_attention")
    if sight not in (None, False, "vision"):
        raise fields.wrong("use_bidirectional_attention", "must be null or 'vision'")
    are_values_keys = fields.flag("attention_k_eq_v", False)
    heads = _read_heads(fields, types, has_full_heads=are_values_keys)
    sources = read_sources(fields, types)
    has_experts = fields.flag("enable_moe_block", False)
    mlp_scale = 2 if fields.flag("use_double_wide_mlp", False) else 1
    return tuple(
        replace(
            layer,
            kv_heads=heads[index],
            kv_layer=sources[index],
            has_value_projection=not (are_values_keys and types[index] == FULL),
            has_parallel_experts=has_experts,
            sees_whole_pictures=sight == "vision" and types[index] != FULL,
            mlp_size=layer.mlp_size * (1 if sources[index] is None else mlp_scale),
        )
        for index, layer in enumerate(layers)
    )


def _read_heads(
    fields: JsonFields, types: Sequence[str], *, has_full_heads: bool
) -> Sequence[KvHeads]:
    """Return the heads of each layer. Full attention has its own, which can be listed by layer."""
    num, dim = fields.positive_int("num_key_value_heads"), fields.positive_int("head_dim")
    full_num = num
    if has_full_heads:
        full_num = fields.positive_int("num_global_key_value_heads", num)
    full = KvHeads(full_num, fields.positive_int("global_head_dim"))
    heads = [full if kind == FULL else KvHeads(num, dim) for kind in types]
    if fields.has("per_layer_config"):
        own = fields.inner("per_layer_config")
        heads = [KvHeads(num, dim)] * len(types)
        for name in own.names():
            if not name.isdecimal() or int(name) >= len(types):
                raise own.wrong(name, f"must be the number of one of {len(types)} layers")
            layer = own.inner(name)
            heads[int(name)] = KvHeads(
                layer.positive_int("num_key_value_heads", num), layer.positive_int("head_dim", dim)
            )
    if any(each.dim % 2 for each in heads):
        raise fields.wrong("head_dim", "must be even in all layers")
    return heads


def read_sources(fields: JsonFields, types: Sequence[str]) -> Sequence[int | None]:
    """Return the layers whose keys and values the layers read: the last ones those of earlier."""
    number = fields.number("num_kv_shared_layers", 0)
    first = len(types) - int(number)
    is_count = number == int(number) and 0 <= number < len(types)
    if not is_count or set(types[:first]) != set(types):
        expected = "must be a number that leaves a layer of each kind its own keys and values"
        raise fields.wrong("num_kv_shared_layers", expected)
    newest = {kind: index for index, kind in enumerate(types[:first])}
    return [None if index < first else newest[kind] for index, kind in enumerate(types)]
