"""Fields of config.json that change the computation, refused unless a family honours them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import Family

# Optional fields that change the computation, with the values that have no effect. Null never has.
# What adds or reshapes a tensor need not be here: each tensor of a folder must be known.
MATH_FIELDS: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "partial_rotary_factor": (1, 1.0),
    "no_rope_layers": (),
    "clip_qkv": (),
    "use_bidirectional_attention": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "hidden_activation": (),
    "use_qk_norm": (False,),
    "attention_out_bias": (False,),
    "attention_chunk_size": (),
    "qkv_bias": (False,),
    "lm_head_bias": (False,),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "dim_model_base": (),
    "attn_temperature_tuning": (False,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "alibi": (False,),
    "position_embedding_type": ("rope",),
    "rope_interleave": (False,),
    "rotary_pct": (1, 1.0),
    "rotary_dim": (),
    "norm_type": ("rms_norm", "rmsnorm", "rms"),
    "normalization_function": ("rmsnorm",),
    "kv_lora_rank": (),
    "index_topk": (),
    "num_kv_shared_layers": (0,),
    "shared_intermediate_size": (0,),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "routed_scaling_factor": (1, 1.0),
    "moe_layer_freq": (1,),
    "decoder_sparse_step": (1,),
    "interleave_moe_layer_step": (1,),
    "first_k_dense_replace": (0,),
    "mlp_only_layers": ([],),
    "moe_layers": ([],),
    "full_attention_interval": (1,),
    "hidden_size_per_layer_input": (0,),
    "activation_sparsity_pattern": (),
    "attention_k_eq_v": (False,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
    "per_layer_config": ({},),
    "linear_conv_kernel_dim": (),
    "linear_key_head_dim": (),
    "linear_value_head_dim": (),
    "linear_num_key_heads": (),
    "linear_num_value_heads": (),
    "linear_allow_neg_eigval": (False,),
    "attn_output_gate": (False,),
    "mamba_ssm_dtype": ("float32",),
    "mamba_n_heads": (),
    "mamba_n_groups": (),
    "mamba_d_state": (),
    "mamba_d_head": (),
    "mamba_d_conv": (),
    "mamba_expand": (),
    "mamba_conv_bias": (),
    "mamba_proj_bias": (False,),
    # transformers 5 writes infinity as an object.
    "time_step_limit": ([0, math.inf], [0, {"__float__": "Infinity"}]),
}
UNSUPPORTED = "changes the computation, and is not supported here"
MATH_PREFIXES = ("mup_",)


def check_fields(fields: JsonFields, family: Family) -> None:
    """Refuse fields that change the computation, but not of this family."""
    activation = fields.get("hidden_activation") or fields.get("hidden_act") or "silu"
    expected = "silu" if family.activation.name != "GELU_TANH" else family.activation.value
    if activation != expected:
        name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
        raise fields.wrong(name, f"must be {expected!r}")
    for name, neutral in MATH_FIELDS.items():
        is_used = name in family.fields or name == "hidden_activation"
        if not is_used and fields.has(name) and fields.get(name) not in neutral:
            raise fields.wrong(name, UNSUPPORTED)
    for name in fields.names():
        if name.startswith(MATH_PREFIXES) and fields.has(name):
            raise fields.wrong(name, UNSUPPORTED)
