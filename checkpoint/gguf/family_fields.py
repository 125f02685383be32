"""Fields of config.json that the metadata of one or a few architectures express. No torch."""

from __future__ import annotations

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.metadata_fields import (
    Fields,
    count_predictors,
    read_head_dim,
    read_integer,
    read_rope_scaling,
)

SIGMOID = 2  # of `expert_gating_func`
# Groups of experts of DeepSeek V2 and V3, and the number that is used, by that of their experts:
# files of 2024 and 2025 lack the fields.
DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}
LLAMA4_CHUNK = 8192
MAVERICK_EXPERTS = 128


def qkv_bias(file: GgufFile) -> Fields:
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return {"attention_bias": any(name in file.tensors for name in names)}


def biases(file: GgufFile) -> Fields:
    return {**qkv_bias(file), "attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def gemma(file: GgufFile) -> Fields:
    """Return the scale of queries, which the metadata lacks: in the 27B models it is another."""
    hidden, heads, layers = (
        read_integer(file, name)
        for name in ("embedding_length", "attention.head_count", "block_count")
    )
    is_27b = layers == (46 if file.architecture == "gemma2" else 62)
    scalar = hidden // heads if is_27b else read_integer(file, "attention.key_length")
    return {"query_pre_attn_scalar": scalar}


def gemma3(file: GgufFile) -> Fields:
    local = file.get("gemma3.rope.freq_base_swa", float, 10_000.0)
    return {**gemma(file), "rope_local_base_freq": local}


def partial_rotation(file: GgufFile) -> Fields:
    rotated = file.get(f"{file.architecture}.rope.dimension_count", int, 0)
    return {"partial_rotary_factor": rotated / max(1, read_head_dim(file))} if rotated else {}


def phi3(file: GgufFile) -> Fields:
    window = file.get("phi3.attention.sliding_window", int, 0)
    return {**partial_rotation(file), "sliding_window": window or None}


def glm(file: GgufFile) -> Fields:
    return {**glm4(file), "head_dim": read_head_dim(file)}


def glm4(file: GgufFile) -> Fields:
    return {**qkv_bias(file), **partial_rotation(file)}


def glm4_moe(file: GgufFile) -> Fields:
    return {
        **glm4(file),
        "norm_topk_prob": file.get("glm4moe.expert_weights_norm", bool, False),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def gpt_oss(file: GgufFile) -> Fields:
    return {**qkv_bias(file), "rope_scaling": {**read_rope_scaling(file), "truncate": False}}


def mistral3(file: GgufFile) -> Fields:
    gain = file.require("mistral3.attention.temperature_scale", float)
    return {"rope_scaling": {**read_rope_scaling(file), "llama_4_scaling_beta": gain}}


def deepseek(file: GgufFile) -> Fields:
    """Return the fields of latent attention.

    llama.cpp stores it as attention with one key head, except in early files.
    """
    rope = read_integer(file, "rope.dimension_count")
    key, value = (
        file.get(f"deepseek2.attention.{name}_mla", int, read_integer(file, f"attention.{name}"))
        for name in ("key_length", "value_length")
    )
    scaling = read_rope_scaling(file)
    if "mscale" in scaling:
        mscale = 10 * file.require("deepseek2.rope.scaling.yarn_log_multiplier", float)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "num_key_value_heads": read_integer(file, "attention.head_count"),
        "head_dim": rope,
        "q_lora_rank": file.get("deepseek2.attention.q_lora_rank", int, 0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "rope_scaling": scaling,
        **_deepseek_experts(file),
    }


def _deepseek_experts(file: GgufFile) -> Fields:
    count = file.get("deepseek2.expert_count", int, 0)
    groups, used = DEEPSEEK_GROUPS.get(count, (1, 1))
    groups = file.get("deepseek2.expert_group_count", int, groups)
    fields: Fields = {
        "n_group": groups,
        "topk_group": file.get("deepseek2.expert_group_used_count", int, used),
        "norm_topk_prob": file.get("deepseek2.expert_weights_norm", bool, False),
    }
    if file.get("deepseek2.expert_gating_func", int, 0) == SIGMOID:
        return {**fields, "architectures": ["DeepseekV3ForCausalLM"]}
    return {**fields, "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def granite(file: GgufFile) -> Fields:
    has_rope = file.get(f"{file.architecture}.rope.scaling.finetuned", bool, True)
    return {**qkv_bias(file), "position_embedding_type": "rope" if has_rope else "nope"}


def granite_hybrid(file: GgufFile) -> Fields:
    """Return the fields of Mamba2, the state of layers without key heads, and of experts."""
    name = "granitehybrid.attention.head_count_kv"
    heads = file.list_of(name, int)
    hidden, inner, size = (
        read_integer(file, each)
        for each in ("embedding_length", "ssm.inner_size", "feed_forward_length")
    )
    if hidden == 0 or inner % hidden:
        raise file.wrong("granitehybrid.ssm.inner_size", f"must be a multiple of {hidden}")
    has_experts = file.get("granitehybrid.expert_count", int, 0)
    shared = file.get("granitehybrid.expert_shared_feed_forward_length", int, size)
    return {
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "mamba_expand": inner // hidden,
        "num_local_experts": has_experts,
        "shared_intermediate_size": shared if has_experts else size,
        **granite(file),
    }


def qwen3_linear(file: GgufFile) -> Fields:
    values, heads = (read_integer(file, f"ssm.{name}") for name in ("inner_size", "time_step_rank"))
    if heads == 0 or values % heads:
        raise file.wrong(f"{file.architecture}.ssm.inner_size", f"must be a multiple of {heads}")
    num_layers = read_integer(file, "block_count") - count_predictors(file)
    layers = range(min(num_layers, len(file.tensors)))  # each has tensors
    types = ("full" if f"blk.{i}.attn_q.weight" in file.tensors else "linear" for i in layers)
    return {
        **partial_rotation(file),
        "linear_value_head_dim": values // heads,
        "layer_types": [f"{kind}_attention" for kind in types],
    }


def llama4(file: GgufFile) -> Fields:
    """Return fields that the metadata lacks, with the values that llama.cpp uses."""
    if file.get("llama4.attention.sliding_window", int, LLAMA4_CHUNK) != LLAMA4_CHUNK:
        raise file.wrong("llama4.attention.sliding_window", f"must be {LLAMA4_CHUNK}")
    experts = read_integer(file, "expert_count")
    return {"attention_chunk_size": LLAMA4_CHUNK, "use_qk_norm": experts != MAVERICK_EXPERTS}
