"""Fields of config.json that the metadata of one or a few architectures express. No torch."""

from __future__ import annotations

from statistics import NormalDist

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.metadata_fields import (
    Fields,
    count_predictors,
    read_head_dim,
    read_integer,
    read_rope_scaling,
)
from baton.core.errors import ModelError

SIGMOID = 2  # of `expert_gating_func`
# Groups of experts of DeepSeek V2 and V3, and the number that is used, by that of their experts:
# files of 2024 and 2025 lack the fields.
DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}
LLAMA4_CHUNK = 8192
NEVER_ROTATES = 1e20  # divisor of frequencies
MAVERICK_EXPERTS = 128
MAX_DEVIATIONS = 8


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


def gemma3n(file: GgufFile) -> Fields:
    """Return what differs by layer, and sizes that only tensors have."""
    # Standard deviations between the mean of a layer's gates and zero: -inf is none.
    name = "gemma3n.activation_sparsity_scale"
    deviations = file.list_of(name, float)
    if any(each != each or each > MAX_DEVIATIONS for each in deviations):
        raise file.wrong(name, f"must have numbers of at most {MAX_DEVIATIONS}")
    rows = {
        field: file.tensors[tensor].shape[0]
        for field, tensor in (
            ("vocab_size_per_layer_input", "per_layer_token_embd.weight"),
            ("laurel_rank", "blk.0.laurel_l.weight"),
        )
        if tensor in file.tensors
    }
    shares = [NormalDist().cdf(each) for each in deviations]
    sizes = "gemma3n.feed_forward_length"
    has_one = type(file.metadata.get(sizes)) is int
    return {
        "rope_local_base_freq": file.get("gemma3n.rope.freq_base_swa", float, 10_000.0),
        "intermediate_size": file.require(sizes, int) if has_one else file.list_of(sizes, int),
        **({"activation_sparsity_pattern": shares} if shares else {}),
        **rows,
    }


def gemma4(file: GgufFile) -> Fields:
    """Return what differs by layer: heads, MLPs and RoPEs."""
    types = ["sliding" if flag else "full" for flag in _windows(file)]
    heads = _by_layer(file, "attention.head_count_kv", len(types))
    sizes = _by_layer(file, "feed_forward_length", len(types))
    full = types.index("full") if "full" in types else 0
    has_experts = bool(file.get("gemma4.expert_count", int, 0))
    experts: Fields = {}
    if has_experts:
        experts = {
            "num_experts": read_integer(file, "expert_count"),
            "top_k_experts": read_integer(file, "expert_used_count"),
            "moe_intermediate_size": read_integer(file, "expert_feed_forward_length"),
        }
    embedding = file.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": [f"{kind}_attention" for kind in types],
        "num_key_value_heads": heads[types.index("sliding") if "sliding" in types else 0],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "enable_moe_block": has_experts,
        **experts,
        **({} if embedding is None else {"vocab_size_per_layer_input": embedding.shape[0]}),
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.get("gemma4.rope.freq_base_swa", float, 10_000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.get("gemma4.rope.freq_base", float, 1_000_000.0),
                "partial_rotary_factor": _rotated_share(file),
            },
        },
    }


def _windows(file: GgufFile) -> list[bool]:
    name = "gemma4.attention.sliding_window_pattern"
    flags = file.list_of(name, bool)
    if len(flags) != read_integer(file, "block_count"):
        raise file.wrong(name, "must have a flag for each layer")
    return flags


def _by_layer(file: GgufFile, name: str, num_layers: int) -> list[int]:
    """Return the number of each layer, of which the file has one for all or one for each."""
    full = f"{file.architecture}.{name}"
    if type(file.metadata.get(full)) is int:
        return [file.require(full, int)] * num_layers
    numbers = file.list_of(full, int)
    if len(numbers) != num_layers:
        raise file.wrong(full, "must be a number, or one for each layer")
    return numbers


def _rotated_share(file: GgufFile) -> float:
    """Return the share of pairs of dimensions that rotate: the frequencies of others are zero."""
    if "rope_freqs.weight" not in file.tensors:
        return 1.0
    divisors = file.read_floats("rope_freqs.weight")
    rotated = [each for each in divisors if each < NEVER_ROTATES]
    if set(rotated) - {1.0} or rotated != list(divisors[: len(rotated)]):
        raise ModelError(
            f"{file.path_of['rope_freqs.weight']}: 'rope_freqs.weight' must be ones, and then "
            f"numbers above {NEVER_ROTATES:g}"
        )
    return len(rotated) / max(1, len(divisors))


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
    scaling = read_rope_scaling(file)
    if "mscale" in scaling:
        mscale = 10 * file.require("deepseek2.rope.scaling.yarn_log_multiplier", float)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {**_latent(file), "rope_scaling": scaling, **_deepseek_experts(file)}


def kimi_linear(file: GgufFile) -> Fields:
    """Return the fields of latent attention, and of linear attention in layers without KV heads."""
    heads = file.list_of("kimi-linear.attention.head_count_kv", int)
    return {
        **_latent(file),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "linear_num_heads": read_integer(file, "attention.head_count"),
        "norm_topk_prob": file.get("kimi-linear.expert_weights_norm", bool, True),
    }


def _latent(file: GgufFile) -> Fields:
    """Return the fields of latent attention.

    llama.cpp stores it as attention with one key head, except in early files.
    """
    prefix = f"{file.architecture}.attention"
    rope = read_integer(file, "rope.dimension_count")
    key, value = (
        file.get(f"{prefix}.{name}_mla", int, file.get(f"{prefix}.{name}", int, 0))
        for name in ("key_length", "value_length")
    )
    return {
        "num_key_value_heads": read_integer(file, "attention.head_count"),
        "head_dim": rope,
        "q_lora_rank": file.get(f"{prefix}.q_lora_rank", int, 0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
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


def falcon_h1(file: GgufFile) -> Fields:
    """Return the norm of Mamba2, which some files have. Matrices contain the multipliers."""
    return {
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


def lfm2(file: GgufFile) -> Fields:
    """Return the types of layers, and names of fields. The size of the MLP is the final one."""
    prefix = f"{file.architecture}.attention"
    heads = file.list_of(f"{prefix}.head_count_kv", int)
    return {
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": file.require(f"{prefix}.layer_norm_rms_epsilon", float),
    }


def nemotron_h(file: GgufFile) -> Fields:
    """Return the types of blocks, by their tensors, and the sizes of MLPs and Mamba2."""
    inner, heads = (read_integer(file, f"ssm.{name}") for name in ("inner_size", "time_step_rank"))
    if heads == 0 or inner % heads:
        raise file.wrong(f"{file.architecture}.ssm.inner_size", f"must be a multiple of {heads}")
    blocks = range(min(read_integer(file, "block_count"), len(file.tensors)))
    dense = [file.tensors.get(f"blk.{index}.ffn_up.weight") for index in blocks]
    sizes = [entry.shape[0] for entry in dense if entry is not None]
    latent = [file.tensors.get(f"blk.{index}.ffn_latent_down.weight") for index in blocks]
    latent_sizes = [entry.shape[0] for entry in latent if entry is not None]
    return {
        "layers_block_type": [_block_type(file, index) for index in blocks],
        "mamba_head_dim": inner // heads,
        "norm_topk_prob": file.get(f"{file.architecture}.expert_weights_norm", bool, True),
        **({"intermediate_size": sizes[0]} if sizes else {}),
        **({"moe_latent_size": latent_sizes[0]} if latent_sizes else {}),
    }


def _block_type(file: GgufFile, index: int) -> str:
    """Return the type of the block that has such a tensor; the loader refuses one without any."""
    types = {"ssm_in": "mamba", "attn_q": "attention", "ffn_up": "mlp"}
    found = (kind for name, kind in types.items() if f"blk.{index}.{name}.weight" in file.tensors)
    return next(found, "moe")


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
