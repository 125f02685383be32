"""Config fields of Cohere's Command and Aya models."""

from __future__ import annotations

from baton.checkpoint.json_fields import JsonFields


def cohere_fields(raw: JsonFields) -> JsonFields:
    """Return the fields with the names that other families have."""
    if not raw.flag("use_parallel_block", True):
        raise raw.wrong("use_parallel_block", "must be true")
    fields: dict[str, object] = {
        "rms_norm_eps": raw.number("layer_norm_eps", above=0),
        "logits_scaling": 1 / raw.number("logit_scale", above=0),
        "logit_scale": None,
    }
    if raw.get("position_embedding_type") == "rope_gptj":  # the interleaved one
        fields["position_embedding_type"] = "rope"
    return raw.with_fields(fields)
