"""Reads RoPE parameters from config.json."""

from __future__ import annotations

from engine.model_folder import JsonFields
from engine.runner.families.family import SLIDING
from engine.runner.model.config import RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
OLD_NAMES = {"su": "longrope", "mrope": "default"}  # mrope equals default for text


def read_ropes(
    raw: JsonFields, types: frozenset[str], *, has_local_rope: bool
) -> dict[str, RopeConfig]:
    """Return the RoPE of each layer type. A local rope is that of windows: it has no scaling."""
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, dict) and any(kind in parameters for kind in types):
        inner = raw.inner("rope_parameters")
        return {kind: _parse(raw, inner.inner(kind), 10_000.0) for kind in types}
    rope = _read(raw)
    by_type = dict.fromkeys(types, rope)
    if has_local_rope and SLIDING in types:
        by_type[SLIDING] = RopeConfig(theta=raw.number("rope_local_base_freq", rope.theta))
    return by_type


def read_rotary_dim(raw: JsonFields, head_dim: int) -> int:
    """Return the number of dimensions that RoPE rotates."""
    share = raw.number("partial_rotary_factor", 1.0)
    name = _name(raw)
    if name is not None:
        share = raw.inner(name).number("partial_rotary_factor", share)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or share > 1:
        raise raw.wrong("partial_rotary_factor", "must leave an even number of dimensions")
    return rotary_dim


def _name(raw: JsonFields) -> str | None:
    return next((n for n in ("rope_scaling", "rope_parameters") if raw.has(n)), None)


def _read(raw: JsonFields) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""
    name, theta = _name(raw), raw.number("rope_theta", 10_000.0)
    return RopeConfig(theta=theta) if name is None else _parse(raw, raw.inner(name), theta)


def _parse(raw: JsonFields, fields: JsonFields, theta: float) -> RopeConfig:
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    kind = OLD_NAMES.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise fields.wrong("rope_type", f"must be one of {', '.join(ROPE_KINDS)}")
    theta = fields.number("rope_theta", theta)
    return RopeConfig(theta=theta) if kind == "default" else _scaled(raw, fields, kind, theta)


def _scaled(raw: JsonFields, fields: JsonFields, kind: str, theta: float) -> RopeConfig:
    longest = raw.positive_int("max_position_embeddings")
    original = fields.positive_int("original_max_position_embeddings", longest)
    # Some folders have the trained length at the top level; it takes precedence.
    original = raw.positive_int("original_max_position_embeddings", original)
    is_llama3, has_ratio = kind == "llama3", kind in ("yarn", "longrope")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=fields.number("factor", longest / original if has_ratio else None),
        original_max_position_embeddings=original,
        low_freq_factor=fields.number("low_freq_factor", None if is_llama3 else 1.0),
        high_freq_factor=fields.number("high_freq_factor", None if is_llama3 else 4.0),
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0) or 1.0,
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", True),
        short_factors=fields.numbers("short_factor") if kind == "longrope" else (),
        long_factors=fields.numbers("long_factor") if kind == "longrope" else (),
    )
