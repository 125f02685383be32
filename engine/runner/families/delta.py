"""Linear attention by the gated delta rule: config fields of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.model.config import RecurrentConfig

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
