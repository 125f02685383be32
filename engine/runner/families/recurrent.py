"""Config fields of recurrent layers: the gated delta rule of Qwen3, and Mamba2 of Granite 4."""

from __future__ import annotations

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.model.config import Recurrence, RecurrentConfig

DELTA_FIELDS = frozenset(
    {
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "attn_output_gate",
    }
)
MAMBA_FIELDS = frozenset(
    {
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_head",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_conv_bias",
    }
)


def delta_rule(raw: JsonFields) -> RecurrentConfig:
    delta = RecurrentConfig(
        num_key_heads=raw.positive_int("linear_num_key_heads"),
        num_value_heads=raw.positive_int("linear_num_value_heads"),
        key_dim=raw.positive_int("linear_key_head_dim"),
        value_dim=raw.positive_int("linear_value_head_dim"),
        conv_size=raw.positive_int("linear_conv_kernel_dim"),
    )
    if delta.num_value_heads % delta.num_key_heads:
        expected = f"must divide linear_num_value_heads ({delta.num_value_heads})"
        raise raw.wrong("linear_num_key_heads", expected)
    if delta.conv_size < 2:
        raise raw.wrong("linear_conv_kernel_dim", "must be at least 2")
    if not raw.flag("attn_output_gate", True):
        raise raw.wrong("attn_output_gate", "must be true")
    return delta


def mamba2(raw: JsonFields) -> RecurrentConfig:
    num_heads = raw.positive_int("mamba_n_heads")
    num_values = raw.positive_int("mamba_expand") * raw.positive_int("hidden_size")
    mamba = RecurrentConfig(
        num_key_heads=raw.positive_int("mamba_n_groups"),
        num_value_heads=num_heads,
        key_dim=raw.positive_int("mamba_d_state"),
        value_dim=_read_head_dim(raw, num_values // num_heads),
        conv_size=raw.positive_int("mamba_d_conv"),
        rule=Recurrence.MAMBA2,
    )
    if mamba.num_values != num_values:
        expected = f"must have the product {num_values} with {num_heads} heads"
        raise raw.wrong("mamba_d_head", expected)
    if num_heads % mamba.num_key_heads:
        raise raw.wrong("mamba_n_groups", f"must divide mamba_n_heads ({num_heads})")
    if mamba.conv_size < 2:
        raise raw.wrong("mamba_d_conv", "must be at least 2")
    if not raw.flag("mamba_conv_bias", True):
        raise raw.wrong("mamba_conv_bias", "must be true")
    return mamba


def _read_head_dim(raw: JsonFields, default: int) -> int:
    is_auto = raw.get("mamba_d_head") == "auto"
    return default if is_auto else raw.positive_int("mamba_d_head", default)
