"""Config fields of recurrent layers: the gated delta rule of Qwen3, and Mamba2.

The multipliers of Falcon-H1 become scales of attention, of embeddings and logits, and of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import FULL, LINEAR
from baton.engine.runner.model.config import (
    LayerConfig,
    ModelConfig,
    Recurrence,
    RecurrentConfig,
    RowScale,
)

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
# Fields of Kimi Linear by the names that other families have for them.
KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Fields that change the computation, with the value that Baton computes, which is the default.
KIMI_FIXED: Mapping[str, object] = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
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


def olmo_delta_rule(raw: JsonFields) -> RecurrentConfig:
    scale = 2.0 if raw.flag("linear_allow_neg_eigval", True) else 1.0
    return replace(delta_rule(raw), norm_epsilon=1e-5, strength_scale=scale)


def kimi_fields(raw: JsonFields) -> JsonFields:
    """Return the fields of Kimi Linear with the names and values that other families have."""
    for name, value in KIMI_FIXED.items():
        if raw.has(name) and raw.get(name) != value:
            raise raw.wrong(name, f"must be {value!r}")
    fields: dict[str, object] = {
        new: raw.get(old) for old, new in KIMI_NAMES.items() if raw.has(old)
    }
    if raw.has("linear_attn_config"):
        linear = raw.inner("linear_attn_config")
        kda = linear.numbers("kda_layers")  # counted from 1
        layers = range(1, raw.positive_int("num_hidden_layers") + 1)
        fields |= {
            "linear_head_dim": linear.positive_int("head_dim"),
            "linear_num_heads": linear.positive_int("num_heads"),
            "linear_conv_kernel_dim": linear.positive_int("short_conv_kernel_size"),
            "layer_types": [LINEAR if layer in kda else FULL for layer in layers],
        }
    return raw.with_fields(fields)


def kimi_delta(raw: JsonFields) -> RecurrentConfig:
    num_heads, dim = raw.positive_int("linear_num_heads"), raw.positive_int("linear_head_dim")
    conv_size = raw.positive_int("linear_conv_kernel_dim")
    if conv_size < 2:
        raise raw.wrong("linear_conv_kernel_dim", "must be at least 2")
    return RecurrentConfig(num_heads, num_heads, dim, dim, conv_size, Recurrence.KIMI_DELTA)


def mamba2(raw: JsonFields) -> RecurrentConfig:
    num_heads = raw.positive_int("mamba_n_heads")
    num_values = raw.positive_int("mamba_expand") * raw.positive_int("hidden_size")
    num_values = raw.positive_int("mamba_d_ssm", num_values)
    mamba = RecurrentConfig(
        num_key_heads=raw.positive_int("mamba_n_groups"),
        num_value_heads=num_heads,
        key_dim=raw.positive_int("mamba_d_state"),
        value_dim=_read_head_dim(raw, num_values // num_heads),
        conv_size=raw.positive_int("mamba_d_conv"),
        rule=Recurrence.MAMBA2,
        has_norm=raw.flag("mamba_rms_norm", True),
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


def falcon_h1_fields(raw: JsonFields) -> JsonFields:
    """Return the fields of Falcon-H1 with the names and values that other families have."""
    if raw.flag("mamba_rms_norm", False) and raw.flag("mamba_norm_before_gate", True):
        raise raw.wrong("mamba_norm_before_gate", "must be false with mamba_rms_norm")
    num_heads = raw.positive_int("num_attention_heads")
    head_dim = raw.positive_int("head_dim", raw.positive_int("hidden_size") // num_heads)
    inputs = _multiplier(raw, "attention_in_multiplier")
    scale = inputs * inputs * _multiplier(raw, "key_multiplier") / math.sqrt(head_dim)
    logits = _multiplier(raw, "lm_head_multiplier")
    return raw.with_fields({"attention_multiplier": scale, "logits_scaling": 1 / logits})


def parallel_everywhere(
    _: JsonFields, __: Sequence[str], layers: Sequence[LayerConfig]
) -> tuple[LayerConfig, ...]:
    """All layers have attention and a recurrent state."""
    return tuple(replace(layer, has_parallel_state=True) for layer in layers)


def falcon_h1_scales(config: ModelConfig, raw: JsonFields) -> Iterable[RowScale]:
    """Yield the scales of the rows of matrices. Those of queries and keys are in the attention."""
    mamba, hidden, mlp_size = config.recurrent, config.hidden_size, config.layers[0].mlp_size
    assert mamba is not None
    gate, down = _multipliers(raw, "mlp_multipliers", 2)
    parts = _multipliers(raw, "ssm_multipliers", 5)
    inputs, outputs = (_multiplier(raw, f"attention_{end}_multiplier") for end in ("in", "out"))
    yield RowScale("self_attn.o_proj", hidden, inputs * outputs)
    yield RowScale("mamba.out_proj", hidden, _multiplier(raw, "ssm_out_multiplier"))
    yield RowScale("feed_forward.gate_proj", mlp_size, gate)
    yield RowScale("feed_forward.down_proj", hidden, down)
    sizes = (mamba.num_values,) * 2 + (mamba.num_keys,) * 2 + (mamba.num_value_heads,)
    for size, part in zip(sizes, parts, strict=True):
        yield RowScale("mamba.in_proj", size, part * _multiplier(raw, "ssm_in_multiplier"))


def _read_head_dim(raw: JsonFields, default: int) -> int:
    is_auto = raw.get("mamba_d_head") == "auto"
    return default if is_auto else raw.positive_int("mamba_d_head", default)


def _multiplier(raw: JsonFields, name: str) -> float:
    return raw.number(name, 1.0, above=0)


def _multipliers(raw: JsonFields, name: str, count: int) -> Sequence[float]:
    found = raw.numbers(name)
    if len(found) != count:
        raise raw.wrong(name, f"must list {count} numbers")
    return found
