"""Reads RoPE parameters from config.json."""

from __future__ import annotations

from dataclasses import replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import SLIDING
from baton.engine.runner.model.config import RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
MAX_MSCALE = 1000
MAX_ALPHA = 1_000_000
NUM_AXES = 3  # of M-RoPE: time, rows, columns
OLD_NAMES = {"su": "longrope", "mrope": "default"}  # mrope equals default for text
KNOWN_FIELDS = frozenset(
    {
        "type",
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "mrope_section",  # for images
        "mrope_interleaved",
        "max_position_embeddings",
        "finetuned",
    }
)


def read_ropes(
    raw: JsonFields,
    types: frozenset[str],
    *,
    has_local_rope: bool,
    fields: frozenset[str] = frozenset(),
) -> dict[str, RopeConfig]:
    """Return the RoPE of each layer type. A local rope is that of windows: it has no scaling.

    `fields` are those that the family honours beyond KNOWN_FIELDS. Raises ModelError for others.
    """
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, dict) and any(kind in parameters for kind in types):
        inner, by_type = raw.inner("rope_parameters"), {}
        for kind in types:
            own = inner.inner(kind)
            share = {"partial_rotary_factor"}
            is_shared = own.get("rope_type") == "proportional"
            _check_names(own, fields | share if is_shared else fields - share)
            by_type[kind] = _parse(raw, own, 10_000.0)
        return by_type
    found, theta = find_rope_fields(raw), _read_theta(raw, "rope_theta", 10_000.0)
    if found is not None:
        _check_names(found, fields)
    rope = RopeConfig(theta=theta) if found is None else _parse(raw, found, theta)
    by_type = dict.fromkeys(types, rope)
    if has_local_rope and SLIDING in types:
        by_type[SLIDING] = RopeConfig(theta=_read_theta(raw, "rope_local_base_freq", rope.theta))
    return by_type


def read_rotary_dim(raw: JsonFields, head_dim: int) -> int:
    """Return the number of dimensions that RoPE rotates."""
    share = raw.number("partial_rotary_factor", raw.number("rotary_dim", head_dim) / head_dim)
    fields = find_rope_fields(raw)
    if fields is not None:
        share = fields.number("partial_rotary_factor", share)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or share > 1:
        raise raw.wrong("partial_rotary_factor", "must leave an even number of dimensions")
    return rotary_dim


def find_rope_fields(raw: JsonFields) -> JsonFields | None:
    """Return `rope_parameters`, or the older `rope_scaling`, which lacks `rope_theta`."""
    names = ("rope_scaling", "rope_parameters")
    return next((raw.inner(name) for name in names if raw.has(name)), None)


def _check_names(found: JsonFields, fields: frozenset[str]) -> None:
    for name in found.names():
        is_neutral = name == "partial_rotary_factor" and found.get(name) == 1
        if found.has(name) and not is_neutral and name not in KNOWN_FIELDS | fields:
            raise found.wrong(name, "changes the computation, and is not supported here")


def _parse(raw: JsonFields, fields: JsonFields, theta: float) -> RopeConfig:
    if fields.has("factor") and not (fields.has("rope_type") or fields.has("type")):
        raise fields.wrong("rope_type", "must name the kind of scaling by 'factor'")
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    kind = OLD_NAMES.get(kind, kind)
    if kind == "yarn" and fields.has("short_factor"):
        kind = "longrope"  # early revisions of Phi-3
    if kind not in ROPE_KINDS:
        raise fields.wrong("rope_type", f"must be one of {', '.join(ROPE_KINDS)}")
    theta = _read_theta(fields, "rope_theta", theta)
    if kind == "dynamic" and fields.has("alpha"):
        kind, theta = "default", _stretch_theta(raw, fields, theta)
    rope = RopeConfig(theta=theta) if kind == "default" else _scaled(raw, fields, kind, theta)
    if not fields.has("mrope_section"):
        return rope
    sections = tuple(int(size) for size in fields.numbers("mrope_section"))
    if len(sections) != NUM_AXES:
        raise fields.wrong("mrope_section", f"must have {NUM_AXES} sizes")
    is_interleaved = fields.flag("mrope_interleaved", False)
    return replace(rope, sections=sections, are_sections_interleaved=is_interleaved)


def _stretch_theta(raw: JsonFields, fields: JsonFields, theta: float) -> float:
    """Return the base of NTK-aware scaling by a fixed `alpha` (HunYuan)."""
    alpha, dim = fields.number("alpha", above=0), raw.positive_int("head_dim")
    if alpha > MAX_ALPHA:
        raise fields.wrong("alpha", f"must be at most {MAX_ALPHA}")
    stretch: float = alpha ** (dim / max(1, dim - 2))
    return theta * stretch


def _read_theta(raw: JsonFields, name: str, default: float) -> float:
    return raw.number(name, default, above=1)


def _scaled(raw: JsonFields, fields: JsonFields, kind: str, theta: float) -> RopeConfig:
    longest = raw.positive_int("max_position_embeddings")
    original = fields.positive_int("original_max_position_embeddings", longest)
    # Some folders have the trained length at the top level; it takes precedence.
    original = raw.positive_int("original_max_position_embeddings", original)
    if original == 1:
        raise fields.wrong("original_max_position_embeddings", "must be above 1")
    is_llama3 = kind == "llama3"
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=fields.number("factor", _default_factor(kind, longest, original), above=0),
        original_max_position_embeddings=original,
        low_freq_factor=fields.number("low_freq_factor", None if is_llama3 else 1.0, above=0),
        high_freq_factor=fields.number("high_freq_factor", None if is_llama3 else 4.0, above=0),
        attention_factor=fields.optional_number("attention_factor", above=0),
        beta_fast=fields.number("beta_fast", 32.0, above=0),
        beta_slow=fields.number("beta_slow", 1.0, above=0),
        mscale=_read_mscale(fields, "mscale"),
        mscale_all_dim=_read_mscale(fields, "mscale_all_dim"),
        truncate=fields.flag("truncate", True),
        short_factors=fields.numbers("short_factor") if kind == "longrope" else (),
        long_factors=fields.numbers("long_factor") if kind == "longrope" else (),
        rotated_share=_read_rotated_share(fields) if kind == "proportional" else 1.0,
    )


def _default_factor(kind: str, longest: int, original: int) -> float | None:
    if kind == "proportional":
        return 1.0
    return longest / original if kind in ("yarn", "longrope") else None


def _read_rotated_share(fields: JsonFields) -> float:
    share = fields.number("partial_rotary_factor", 1.0, above=0)
    if share > 1:
        raise fields.wrong("partial_rotary_factor", "must be at most 1")
    return share


def _read_mscale(fields: JsonFields, name: str) -> float | None:
    mscale = fields.optional_number(name)
    if mscale is not None and abs(mscale) > MAX_MSCALE:
        raise fields.wrong(name, f"must be at most {MAX_MSCALE}")
    return mscale
