"""Architectures of GGUF files: config.json and tensor names of the hub, from their metadata.

An architecture is an entry in `ARCHITECTURES`. Metadata fields are named without the architecture's
prefix. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from baton.checkpoint.gguf.family_fields import (
    biases,
    deepseek,
    falcon_h1,
    gemma,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_hybrid,
    kimi_linear,
    lfm2,
    llama4,
    mistral3,
    nemotron_h,
    partial_rotation,
    phi3,
    qkv_bias,
    qwen3_linear,
)
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.hub_tensors import (
    GLOBAL_NAMES,
    LAYER_NAMES,
    PREDICTOR_NAMES,
    Change,
    HubTensor,
    NameRules,
    as_row,
    as_third_of_four,
    flat,
    groups_from_parts,
    groups_from_rounds,
    halves_from_pairs,
    hub_tensors,
    with_channel,
)
from baton.checkpoint.gguf.metadata_fields import (
    Fields,
    count_predictors,
    read_common_fields,
    read_floats,
    read_head_dim,
    read_integer,
    read_integers,
)
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError

Changes = Mapping[str, Change]
NO_CHANGES: Changes = {}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Entry of an architecture: its name on the hub, metadata fields and tensor names."""

    hub_name: str
    integers: Mapping[str, str] = field(default_factory=dict)  # further fields
    floats: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)  # fields that no metadata has
    more: Callable[[GgufFile], Fields] | None = None
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    global_names: Mapping[str, str] = field(default_factory=lambda: GLOBAL_NAMES)
    has_paired_heads: bool = False  # rows of queries and keys in pairs; the hub has two halves
    norm_offset: float = 0.0  # see NameRules
    changes: Callable[[GgufFile], Changes] | Changes = field(default_factory=lambda: NO_CHANGES)
    by_layer: frozenset[str] = frozenset()  # fields that `more` reads, with a number for each layer

    def rules(self, file: GgufFile) -> NameRules:
        changes = self.changes(file) if callable(self.changes) else self.changes
        if self.has_paired_heads:
            changes = {**changes, **_paired_heads(file)}
        num_layers = read_integer(file, "block_count")
        predictors = range(num_layers - count_predictors(file), num_layers)
        names = {**self.layer_names, **PREDICTOR_NAMES} if predictors else self.layer_names
        is_joined = "attn_qkv" not in self.layer_names and any(
            ".attn_qkv." in name for name in file.tensors
        )
        joined = {"attn_qkv": _rows_of_heads(file)} if is_joined else {}
        return NameRules(names, self.global_names, changes, joined, self.norm_offset, predictors)


def find_architecture(file: GgufFile) -> GgufArchitecture:
    name = file.architecture
    variant, field_name = VARIANTS.get(name, ("", ""))
    if variant and file.has(f"{name}.{field_name}"):
        return ARCHITECTURES[variant]
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{file.path} has the architecture {name!r}, which Baton does not read from GGUF; "
            f"it reads {known}"
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> JsonFields:
    """Return the fields of config.json."""
    found = find_architecture(file)
    fields: Fields = {
        "architectures": [found.hub_name],
        **found.fixed,
        **read_common_fields(file, found.by_layer),
        **read_integers(file, found.integers),
        **read_floats(file, found.floats),
    }
    if found.more is not None:
        fields |= found.more(file)
    return JsonFields(str(file.path), fields)


def read_tensors(file: GgufFile) -> dict[str, HubTensor]:
    return hub_tensors(file, find_architecture(file).rules(file))


def _paired_heads(file: GgufFile) -> Changes:
    names = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    counts = read_integers(file, names)
    counts = {"attn_k": counts.get("attn_q", 0), **counts}
    return {name: Change(halves_from_pairs(int(str(count)))) for name, count in counts.items()}


def _rows_of_heads(file: GgufFile) -> Mapping[str, int]:
    """Return the number of rows of queries, keys and values that are joined in one tensor."""
    names = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    counts, head_dim = read_integers(file, names), read_head_dim(file)
    queries = int(str(counts.get("attn_q", 0))) * head_dim
    keys = int(str(counts["attn_k"])) * head_dim if "attn_k" in counts else queries
    return {"attn_q": queries, "attn_k": keys, "attn_v": keys}


def _delta_changes(file: GgufFile) -> Changes:
    """Linear attention of Qwen3-Next: the hub has its rows by key head."""
    groups, inner, key = (
        read_integer(file, f"ssm.{name}") for name in ("group_count", "inner_size", "state_size")
    )
    keys = groups * key
    rows = groups_from_parts(groups, keys, keys, inner, inner)
    return {**LINEAR_CHANGES, "attn_qkv": Change(rows)}


def _tiled_changes(file: GgufFile) -> Changes:
    """Linear attention of Qwen3.5: llama.cpp has one value head of each key head, then the next."""
    groups, heads, key = (
        read_integer(file, f"ssm.{name}")
        for name in ("group_count", "time_step_rank", "state_size")
    )
    keys = groups * key
    all_rows, values = (
        groups_from_rounds(groups, heads),
        groups_from_rounds(groups, heads, 2 * keys),
    )
    return {
        **LINEAR_CHANGES,
        "attn_qkv": Change(values),
        "attn_gate": Change(all_rows),
        "ssm_alpha": Change(all_rows),
        "ssm_beta": Change(all_rows),
        "ssm_conv1d": Change(values, shape=with_channel),
        "ssm_a": Change(all_rows, is_rate=True),
        "ssm_dt": Change(all_rows),
        "ssm_out": Change(columns=all_rows),
    }


# Architectures of llama.cpp that stand for two of the hub: the other one, and the field it has.
VARIANTS = {
    "llama": ("mixtral", "expert_count"),
    "olmo2": ("olmo3", "attention.sliding_window"),
    "mistral3": ("ministral3", "attention.temperature_scale"),
}
WINDOW = {"sliding_window": "attention.sliding_window"}
EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SHARED_EXPERT = {
    **EXPERTS,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
ROUTED_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
ERNIE_EXPERTS = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
EXPERT_SCALE = {"routed_scaling_factor": "expert_weights_scale"}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
COHERE = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh"}
LATENT = {"kv_lora_rank": "attention.kv_lora_rank"}
LINEAR = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
MAMBA = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
SANDWICH_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PER_LAYER_NAMES = {
    **SANDWICH_NAMES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA3N_NAMES = {
    **PER_LAYER_NAMES,
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA4_NAMES = {
    **PER_LAYER_NAMES,
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps.weight": "experts.gate_up_proj",
    "ffn_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
POST_NORMS = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST_ATTENTION = {**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"}
FUSED_MLP = {**LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"}
FUSED = {**FUSED_MLP, "attn_qkv": "self_attn.qkv_proj"}
SHARED_EXPERT_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS_NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
STACKED_EXPERTS_NAMES = {
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of early files
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
MIXTRAL_NAMES = {
    **LAYER_NAMES,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
KIMI_NAMES = {
    **MIXTRAL_NAMES,
    **LATENT_NAMES,
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{
        f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
GRANITE_NAMES = {
    **LAYER_NAMES,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
GRANITE_HYBRID_NAMES = {
    **GRANITE_NAMES,
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
FALCON_H1_NAMES = {
    **{name: each.replace("mlp.", "feed_forward.") for name, each in LAYER_NAMES.items()},
    **{name: each for name, each in GRANITE_HYBRID_NAMES.items() if name.startswith("ssm_")},
    "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp's converter leaves out `.weight`
}
LFM2_NAMES = {
    **LAYER_NAMES,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
NEMOTRON_H_NAMES = {
    "attn_norm": "norm",  # of any block
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj",
    "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    **{
        name: each.replace("mamba.", "mixer.")
        for name, each in GRANITE_HYBRID_NAMES.items()
        if name.startswith("ssm_")
    },
}
LINEAR_NAMES = {
    **POST_ATTENTION,
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN3_NEXT_NAMES = {
    **LINEAR_NAMES,
    **SHARED_EXPERT_NAMES,
    "ssm_in": "linear_attn.in_proj_qkvz",  # of early files
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
QWEN3_5_NAMES = {
    **LINEAR_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
LLAMA4_NAMES = {
    **{name: each.replace("mlp.", "feed_forward.") for name, each in LAYER_NAMES.items()},
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
SHARED_GATE = {"ffn_gate_inp_shexp": Change(shape=as_row)}
BY_HEAD = {
    "attn_k_b": Change(is_by_head=True, is_transposed=True),
    "attn_v_b": Change(is_by_head=True),
}
LINEAR_CHANGES = {
    **SHARED_GATE,
    "ssm_conv1d": Change(shape=with_channel),
    "ssm_a": Change(is_rate=True),
    "ssm_norm": Change(),  # without the offset of other norms
}
MAMBA_CHANGES = {
    "ssm_conv1d": Change(shape=with_channel),
    "ssm_conv1d.bias": Change(),
    "ssm_a": Change(shape=flat, is_rate=True),
    "ssm_d": Change(shape=flat),
    "ssm_norm": Change(shape=flat),
}
QWEN3_MOE = GgufArchitecture(
    "Qwen3MoeForCausalLM", EXPERTS, fixed={"norm_topk_prob": True}, more=qkv_bias
)
LFM2 = GgufArchitecture(
    "Lfm2ForCausalLM",
    {"conv_L_cache": "shortconv.l_cache"},
    more=lfm2,
    layer_names=LFM2_NAMES,
    changes={"shortconv.conv": Change(shape=with_channel)},
)
NEMOTRON_H = GgufArchitecture(
    "NemotronHForCausalLM",
    {
        **ROUTED_EXPERTS,
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
    },
    {**EXPERT_SCALE, "layer_norm_epsilon": "attention.layer_norm_rms_epsilon"},
    more=nemotron_h,
    layer_names=NEMOTRON_H_NAMES,
    global_names={
        **GLOBAL_NAMES,
        "token_embd": "model.embeddings",
        "output_norm": "model.norm_f",
    },
    changes=MAMBA_CHANGES,
    by_layer=frozenset({"intermediate_size"}),
)
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", has_paired_heads=True, more=qkv_bias),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", more=qkv_bias),
    "qwen3moe": QWEN3_MOE,
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM"),  # the text models of Qwen2.5-VL and Qwen3-VL
    "qwen3vl": GgufArchitecture("Qwen3ForCausalLM", more=qkv_bias),
    "qwen3vlmoe": QWEN3_MOE,
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        WINDOW,
        SOFT_CAPS,
        GEMMA_FIXED,
        gemma,
        layer_names=SANDWICH_NAMES,
        norm_offset=1.0,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        WINDOW,
        SOFT_CAPS,
        GEMMA_FIXED,
        gemma3,
        layer_names=SANDWICH_NAMES,
        norm_offset=1.0,
    ),
    "gemma3n": GgufArchitecture(
        "Gemma3nForCausalLM",
        {
            **WINDOW,
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "altup_num_inputs": "altup.num_inputs",
            "altup_active_idx": "altup.active_idx",
        },
        SOFT_CAPS,
        GEMMA_FIXED,
        gemma3n,
        layer_names=GEMMA3N_NAMES,
        global_names={  # a matrix for each stream but the first one, stacked
            **GLOBAL_NAMES,
            "altup_proj": "model.altup_projections.{expert}",
            "altup_unembd_proj": "model.altup_unembed_projections.{expert}",
        },
        by_layer=frozenset({"intermediate_size"}),
    ),
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        {
            **WINDOW,
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
        },
        SOFT_CAPS,
        GEMMA_FIXED,
        gemma4,
        layer_names=GEMMA4_NAMES,
        by_layer=frozenset({"num_key_value_heads", "intermediate_size"}),
    ),
    "mixtral": GgufArchitecture(
        "MixtralForCausalLM",
        LOCAL_EXPERTS,
        fixed={"sliding_window": None},
        layer_names=MIXTRAL_NAMES,
        has_paired_heads=True,
    ),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM",
        LOCAL_EXPERTS,
        more=partial_rotation,
        layer_names={
            **MIXTRAL_NAMES,
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "mistral3": GgufArchitecture(
        "MistralForCausalLM", fixed={"sliding_window": None}, has_paired_heads=True
    ),
    "ministral3": GgufArchitecture("Ministral3ForCausalLM", more=mistral3, has_paired_heads=True),
    "granite": GgufArchitecture(
        "GraniteForCausalLM", floats=GRANITE, more=granite, has_paired_heads=True
    ),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM",
        LOCAL_EXPERTS,
        GRANITE,
        more=granite,
        layer_names=GRANITE_NAMES,
        has_paired_heads=True,
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        {**LOCAL_EXPERTS, **MAMBA},
        GRANITE,
        more=granite_hybrid,
        layer_names=GRANITE_HYBRID_NAMES,
        has_paired_heads=True,
        changes=MAMBA_CHANGES,
    ),
    "falcon-h1": GgufArchitecture(
        "FalconH1ForCausalLM",
        {**MAMBA, "mamba_d_ssm": "ssm.inner_size"},
        more=falcon_h1,
        layer_names=FALCON_H1_NAMES,
        global_names={**GLOBAL_NAMES, "output_norm": "model.final_layernorm"},
        changes=MAMBA_CHANGES,
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "lfm2": LFM2,
    "lfm2moe": replace(
        LFM2,
        hub_name="Lfm2MoeForCausalLM",
        integers={**LFM2.integers, **EXPERTS, "num_dense_layers": "leading_dense_block_count"},
        layer_names={
            **LFM2_NAMES,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
            "ffn_up_exps": "feed_forward.experts.{expert}.w3",
            "ffn_down_exps": "feed_forward.experts.{expert}.w2",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", more=qkv_bias, has_paired_heads=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", layer_names=POST_NORMS),
    "olmo3": GgufArchitecture("Olmo3ForCausalLM", WINDOW, layer_names=POST_NORMS),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": GgufArchitecture(
        "Ernie4_5_MoeForCausalLM",
        ERNIE_EXPERTS,
        layer_names={
            **LAYER_NAMES,
            **SHARED_EXPERTS_NAMES,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        changes={"exp_probs_b": Change(shape=as_row)},
    ),
    "hunyuan-dense": GgufArchitecture(
        "HunYuanDenseV1ForCausalLM",
        layer_names={
            **LAYER_NAMES,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "exaone4": GgufArchitecture(
        "Exaone4ForCausalLM", WINDOW, fixed={"sliding_window": None}, layer_names=POST_NORMS
    ),
    "command-r": GgufArchitecture("CohereForCausalLM", floats=COHERE),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", WINDOW, COHERE),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", EXPERTS),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", more=biases, layer_names=POST_ATTENTION),
    "chatglm": GgufArchitecture("GlmForCausalLM", more=glm, layer_names=FUSED_MLP),  # GLM-4 9B
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        more=glm4,
        layer_names={
            **FUSED_MLP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        ROUTED_EXPERTS,
        EXPERT_SCALE,
        more=glm4_moe,
        layer_names={**POST_ATTENTION, **SHARED_EXPERTS_NAMES},
    ),
    "deepseek2": GgufArchitecture(
        "DeepseekV2ForCausalLM",
        {**ROUTED_EXPERTS, **LATENT},
        EXPERT_SCALE,
        more=deepseek,
        layer_names={**LAYER_NAMES, **LATENT_NAMES, **SHARED_EXPERTS_NAMES},
        changes=BY_HEAD,
    ),
    "kimi-linear": GgufArchitecture(
        "KimiLinearForCausalLM",
        {
            **ROUTED_EXPERTS,
            **LATENT,
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_head_dim": "kda.head_dim",
        },
        EXPERT_SCALE,
        more=kimi_linear,
        layer_names=KIMI_NAMES,
        changes={
            **BY_HEAD,
            **{f"ssm_conv1d_{part}": Change(shape=with_channel) for part in "qkv"},
            "ssm_a": Change(shape=as_third_of_four, is_rate=True),
        },
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        {**LOCAL_EXPERTS, **WINDOW},
        more=gpt_oss,
        layer_names={
            **POST_ATTENTION,
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
    "llama4": GgufArchitecture(
        "Llama4ForCausalLM",
        {
            **LOCAL_EXPERTS,
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        more=llama4,
        layer_names=LLAMA4_NAMES,
    ),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM",
        SHARED_EXPERT,
        layer_names={**LAYER_NAMES, **SHARED_EXPERT_NAMES},
        changes=SHARED_GATE,
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        {**SHARED_EXPERT, **LINEAR},
        more=qwen3_linear,
        layer_names=QWEN3_NEXT_NAMES,
        norm_offset=1.0,
        changes=_delta_changes,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        LINEAR,
        more=qwen3_linear,
        layer_names=QWEN3_5_NAMES,
        norm_offset=1.0,
        changes=_tiled_changes,
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM",
        {**SHARED_EXPERT, **LINEAR},
        more=qwen3_linear,
        layer_names={**QWEN3_5_NAMES, **SHARED_EXPERT_NAMES, **STACKED_EXPERTS_NAMES},
        norm_offset=1.0,
        changes=_tiled_changes,
    ),
    "phi3": GgufArchitecture("Phi3ForCausalLM", more=phi3, layer_names=FUSED),
}
