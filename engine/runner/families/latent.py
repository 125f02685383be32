"""Reads multi-head latent attention (MLA) from config.json."""

from __future__ import annotations

from dataclasses import replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.model.config import LatentConfig, ModelConfig


def with_latent(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    """Return the configuration with latent attention: the heads of a token share one cached key."""
    if fields.positive_int("num_key_value_heads", config.num_heads) != config.num_heads:
        raise fields.wrong("num_key_value_heads", f"must be {config.num_heads}, as many as heads")
    latent = LatentConfig(
        query_rank=fields.positive_int("q_lora_rank") if fields.has("q_lora_rank") else None,
        rank=_even(fields, "kv_lora_rank"),
        nope_dim=_even(fields, "qk_nope_head_dim"),
        rope_dim=_even(fields, "qk_rope_head_dim"),
        value_dim=fields.positive_int("v_head_dim"),
    )
    return replace(
        config,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        rotary_dim=latent.rope_dim,
        attention_scale=_attention_scale(config, latent),
        latent=latent,
    )


def _even(fields: JsonFields, name: str) -> int:
    found = fields.positive_int(name)
    if found % 2:
        raise fields.wrong(name, "must be even")
    return found


def _attention_scale(config: ModelConfig, latent: LatentConfig) -> float:
    """Return the scale of a head before its queries are projected, times the square of `mscale`."""
    [rope] = config.ropes
    mscale = rope.mscale_of(rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    return scale * mscale**2
