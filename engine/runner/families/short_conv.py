"""Config fields of short convolutions between layers with attention (LFM2)."""

from __future__ import annotations

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import FULL, LINEAR
from baton.engine.runner.model.config import Recurrence, RecurrentConfig

MAX_MULTIPLIER = 1000


def lfm2_fields(raw: JsonFields) -> JsonFields:
    """Return the fields of LFM2 with the names and values that other families have."""
    tied = "tie_embedding" if raw.has("tie_embedding") else "tie_word_embeddings"
    return raw.with_fields(
        {
            "intermediate_size": _mlp_size(raw),
            "layer_types": _layer_types(raw),
            "rms_norm_eps": raw.number("norm_eps", above=0),
            "tie_word_embeddings": raw.flag(tied, True),
        }
    )


def lfm2_moe_fields(raw: JsonFields) -> JsonFields:
    if not raw.flag("use_expert_bias", True):
        raise raw.wrong("use_expert_bias", "must be true")
    num_dense = raw.number("num_dense_layers")
    return lfm2_fields(raw).with_fields({"first_k_dense_replace": num_dense})


def short_conv(raw: JsonFields) -> RecurrentConfig:
    conv_size = raw.positive_int("conv_L_cache")
    if conv_size < 2:
        raise raw.wrong("conv_L_cache", "must be at least 2")
    if raw.flag("conv_bias", False):
        raise raw.wrong("conv_bias", "must be false")
    return RecurrentConfig(
        num_key_heads=1,
        num_value_heads=1,
        key_dim=0,
        value_dim=raw.positive_int("hidden_size"),
        conv_size=conv_size,
        rule=Recurrence.SHORT_CONV,
    )


def _mlp_size(raw: JsonFields) -> int:
    size = raw.positive_int("block_ff_dim" if raw.has("block_ff_dim") else "intermediate_size")
    if not raw.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if not raw.has("block_ffn_dim_multiplier"):
        return size
    multiplier = raw.number("block_ffn_dim_multiplier", above=0)
    if multiplier > MAX_MULTIPLIER:
        raise raw.wrong("block_ffn_dim_multiplier", f"must be at most {MAX_MULTIPLIER}")
    multiple = raw.positive_int("block_multiple_of")
    return multiple * -(-int(multiplier * size) // multiple)


def _layer_types(raw: JsonFields) -> object:
    types = raw.get("layer_types")
    if isinstance(types, list):
        return [LINEAR if each == "conv" else each for each in types]
    layers = range(raw.positive_int("num_hidden_layers"))
    listed = raw.numbers("full_attn_idxs") if raw.has("full_attn_idxs") else layers
    return types or [FULL if layer in listed else LINEAR for layer in layers]
