"""Architectures of GGUF files: config.json and tensor names of the hub, from their metadata.

An architecture is an entry in `ARCHITECTURES`. Metadata fields are named without the architecture's
prefix. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.hub_tensors import (
    LAYER_NAMES,
    SANDWICH_NAMES,
    HubTensor,
    NameRules,
    hub_tensors,
)
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError

Fields = dict[str, object]
# Metadata fields of all architectures, by their names in config.json.
INTEGERS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
FLOATS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
WINDOW = {"sliding_window": "attention.sliding_window"}
EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is particular to an architecture."""

    hub_name: str  # in config.json
    integers: Mapping[str, str] = field(default_factory=dict)  # further fields
    floats: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)  # fields that no metadata has
    more: Callable[[GgufFile], Fields] | None = None
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    has_paired_heads: bool = False  # see NameRules
    norm_offset: float = 0.0

    def rules(self, file: GgufFile) -> NameRules:
        paired = {}
        if self.has_paired_heads:
            counts = _integers(file, INTEGERS)
            heads = int(str(counts["num_attention_heads"]))
            paired = {"attn_q": heads, "attn_k": int(str(counts.get("num_key_value_heads", heads)))}
        return NameRules(self.layer_names, paired, self.norm_offset)


def find_architecture(file: GgufFile) -> Architecture:
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
        **_integers(file, {**INTEGERS, **found.integers}),
        **_floats(file, {**FLOATS, **found.floats}),
        **_rope_scaling(file),
        **_window_pattern(file),
        "vocab_size": _embedding_rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    if found.more is not None:
        fields |= found.more(file)
    return JsonFields(str(file.path), fields)


def read_tensors(file: GgufFile) -> dict[str, HubTensor]:
    return hub_tensors(file, find_architecture(file).rules(file))


def _integers(file: GgufFile, names: Mapping[str, str]) -> Fields:
    found: Fields = {}
    for hub_name, name in names.items():
        full = f"{file.architecture}.{name}"
        if not file.has(full):
            continue
        value = file.metadata[full]
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # the same in all layers
        if type(value) is not int:
            raise file.wrong(full, "must be a whole number, the same in all layers")
        found[hub_name] = value
    return found


def _floats(file: GgufFile, names: Mapping[str, str]) -> Fields:
    prefix = file.architecture
    return {
        hub_name: file.require(f"{prefix}.{name}", float)
        for hub_name, name in names.items()
        if file.has(f"{prefix}.{name}")
    }


def _window_pattern(file: GgufFile) -> Fields:
    """Return which layers have a window, where the file says it."""
    name = f"{file.architecture}.attention.sliding_window_pattern"
    pattern = file.metadata.get(name)
    if type(pattern) is int:
        return {"sliding_window_pattern": pattern}
    flags = file.list_of(name, bool)
    types = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return {"layer_types": types} if any(flags) else {}


def _embedding_rows(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'; fetch it again")
    return file.tensors["token_embd.weight"].shape[0]


def _dtype(file: GgufFile) -> str:
    types = {entry.type.name for entry in file.tensors.values()}
    return "float32" if types == {"F32"} else "bfloat16"


def _rope_scaling(file: GgufFile) -> Fields:
    """Return how RoPE is scaled. Factors by dimension are tensors of their own."""
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    factors = [
        name for name in ("rope_freqs", "rope_factors_long") if f"{name}.weight" in file.tensors
    ]
    if factors:
        return _rope_factors(file, prefix)
    if kind == "none" or not file.has(f"{prefix}.factor"):
        return {}
    if kind not in ("linear", "yarn"):
        raise file.wrong(f"{prefix}.type", "must be linear, yarn or longrope with its factors")
    scaling: Fields = {"rope_type": kind, "factor": file.require(f"{prefix}.factor", float)}
    if file.has(f"{prefix}.original_context_length"):
        length = file.require(f"{prefix}.original_context_length", int)
        scaling["original_max_position_embeddings"] = length
    return {"rope_scaling": scaling}


def _rope_factors(file: GgufFile, prefix: str) -> Fields:
    """Return factors as those of LongRoPE. Llama 3 has the same ones for all lengths."""
    if "rope_freqs.weight" in file.tensors:
        factors = file.read_floats("rope_freqs.weight")
        scaling: Fields = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    else:
        scaling = {
            "short_factor": file.read_floats("rope_factors_short.weight"),
            "long_factor": file.read_floats("rope_factors_long.weight"),
        }
        if file.has(f"{prefix}.attn_factor"):
            scaling["attention_factor"] = file.require(f"{prefix}.attn_factor", float)
    if file.has(f"{prefix}.original_context_length"):
        length = file.require(f"{prefix}.original_context_length", int)
        scaling["original_max_position_embeddings"] = length
    return {"rope_scaling": {"rope_type": "longrope", **scaling}}


def _qwen_bias(file: GgufFile) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _gemma(file: GgufFile) -> Fields:
    """The scale of queries is not in the metadata: in the 27B models alone it is another."""
    fields = _integers(file, INTEGERS)
    hidden, heads, layers = (
        int(str(fields[name]))
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    is_27b = layers == (46 if file.architecture == "gemma2" else 62)
    return {"query_pre_attn_scalar": hidden // heads if is_27b else fields["head_dim"]}


def _gemma3(file: GgufFile) -> Fields:
    local = file.get("gemma3.rope.freq_base_swa", float, 10_000.0)
    return {**_gemma(file), "rope_local_base_freq": local}


def _partial_rotation(file: GgufFile) -> Fields:
    rotated = file.get(f"{file.architecture}.rope.dimension_count", int, 0)
    fields = _integers(file, INTEGERS)
    heads, hidden = (int(str(fields[name])) for name in ("num_attention_heads", "hidden_size"))
    head_dim = int(str(fields.get("head_dim", hidden // heads)))
    return {"partial_rotary_factor": rotated / head_dim} if rotated else {}


def _phi3(file: GgufFile) -> Fields:
    window = file.get("phi3.attention.sliding_window", int, 0)
    return {**_partial_rotation(file), "sliding_window": window or None}


def _biases(file: GgufFile) -> Fields:
    return {**_qwen_bias(file), "attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _glm4(file: GgufFile) -> Fields:
    return {**_qwen_bias(file), **_partial_rotation(file)}


# Architectures of llama.cpp that stand for two of the hub: the other one, and the field it has.
VARIANTS = {"llama": ("mixtral", "expert_count"), "olmo2": ("olmo3", "attention.sliding_window")}
LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
POST_NORMS = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", has_paired_heads=True, more=_qwen_bias),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", more=_qwen_bias),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", EXPERTS, fixed={"norm_topk_prob": True}, more=_qwen_bias
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        WINDOW,
        SOFT_CAPS,
        GEMMA_FIXED,
        _gemma,
        layer_names=SANDWICH_NAMES,
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        WINDOW,
        SOFT_CAPS,
        GEMMA_FIXED,
        _gemma3,
        layer_names=SANDWICH_NAMES,
        norm_offset=1.0,
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        LOCAL_EXPERTS,
        fixed={"sliding_window": None},
        layer_names={
            **LAYER_NAMES,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        },
        has_paired_heads=True,
    ),
    "granite": Architecture(
        "GraniteForCausalLM", floats=GRANITE, more=_qwen_bias, has_paired_heads=True
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", more=_qwen_bias, has_paired_heads=True),
    "olmo2": Architecture("Olmo2ForCausalLM", layer_names=POST_NORMS),
    "olmo3": Architecture("Olmo3ForCausalLM", WINDOW, layer_names=POST_NORMS),
    "olmoe": Architecture("OlmoeForCausalLM", EXPERTS),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        more=_biases,
        layer_names={**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        more=_glm4,
        layer_names={
            **LAYER_NAMES,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        layer_names={
            **LAYER_NAMES,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        more=_phi3,
        layer_names={**LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"},
    ),
}
