"""Model families, one entry per architecture of config.json.

A family that combines known parts needs an entry here and a variant in the golden tests
(`tests/support/families.py`); see docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.engine.runner.families.blocks import (
    NEMOTRON_H,
    NEMOTRON_H_NAMES,
    dense_of_blocks,
    nemotron_h_fields,
    nemotron_h_layers,
    nemotron_h_mamba,
    nemotron_h_moe,
    no_rope,
)
from baton.engine.runner.families.cohere import cohere_fields
from baton.engine.runner.families.defaults import (
    BAMBA,
    COHERE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE,
    ERNIE_MOE,
    FALCON_H1,
    GEMMA3,
    GEMMA4,
    GLM4_LITE,
    GPT_OSS,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    LLAMA,
    LLAMA4,
    MINISTRAL,
    MISTRAL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from baton.engine.runner.families.family import Family, NormNames, RecurrentNames, TensorNames
from baton.engine.runner.families.gemma3n import (
    GEMMA3N,
    GEMMA3N_FIELDS,
    LARGEST_MLP,
    altup,
    gemma3n_fields,
    gemma3n_layers,
)
from baton.engine.runner.families.layer_types import (
    all_without_rope,
    all_without_theta,
    chunks_with_rope,
    dense_at_first,
    dense_everywhere,
    dense_of_step,
    dense_outside_listed,
    dense_outside_range,
    dense_where_listed,
    dense_without_experts,
    full_every,
    full_every_fourth,
    full_without_rope,
    layers_without_rope,
    linear_between_full,
    linear_outside_indices,
    linear_where_listed,
    window_alternating,
    window_everywhere,
    window_from_layer,
    window_if_used,
    window_without_rope,
)
from baton.engine.runner.families.mixtures import (
    ERNIE_EXPERTS,
    GEMMA4_EXPERTS,
    GRANITE_EXPERTS,
    GRANITE_SHARED_EXPERTS,
    KIMI_EXPERTS,
    LFM2_EXPERTS,
    LLAMA4_EXPERTS,
    MINIMAX_EXPERTS,
    MIXTRAL_EXPERTS,
    OPENAI_EXPERTS,
    QWEN3_5_EXPERTS,
    QWEN3_VL_EXPERTS,
    QWEN_EXPERTS,
    SHARED_EXPERTS,
    SHARED_GATED_EXPERTS,
    UNCORRECTED_SHARED_EXPERTS,
    deepseek_v2_moe,
    deepseek_v3_moe,
    ernie_moe,
    gemma4_moe,
    glm4_moe,
    gpt_oss_moe,
    granite_moe,
    granite_shared_moe,
    lfm2_moe,
    llama4_moe,
    llama4_temperature,
    minimax_moe,
    ministral_temperature,
    mixtral_moe,
    olmoe_moe,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_vl_moe,
)
from baton.engine.runner.families.recurrent import (
    DELTA_FIELDS,
    MAMBA_FIELDS,
    delta_rule,
    falcon_h1_fields,
    falcon_h1_scales,
    kimi_delta,
    kimi_fields,
    mamba2,
    olmo_delta_rule,
    parallel_everywhere,
)
from baton.engine.runner.families.short_conv import lfm2_fields, lfm2_moe_fields, short_conv
from baton.engine.runner.families.unlike_layers import GEMMA4_FIELDS, gemma4_layers, gemma4_types
from baton.engine.runner.model.config import Activation, QkNorm

SANDWICH = TensorNames(
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
POST_NORM = TensorNames(
    input_norm="",
    attention_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)
FUSED_MLP = TensorNames(gate_up=("mlp.gate_up_proj",))
GEMMA_FIELDS = frozenset(
    {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attention_bias"}
)
GRANITE_FIELDS = frozenset(
    {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    }
)
BIAS = frozenset({"attention_bias"})
PARTIAL = frozenset({"partial_rotary_factor"})
EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"})
SPARSE_LAYERS = frozenset({"decoder_sparse_step", "mlp_only_layers"})
GLM_EXPERTS = frozenset(
    {"n_shared_experts", "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"}
)
RECURRENT = BIAS | PARTIAL | DELTA_FIELDS
QWEN3_NEXT_NAMES = TensorNames(
    experts=SHARED_GATED_EXPERTS,
    recurrent=RecurrentNames(
        "linear_attn", ("linear_attn.in_proj_qkvz",), ("linear_attn.in_proj_ba",)
    ),
    ignored=("mtp.",),
)
QWEN3_5_NAMES = TensorNames(
    recurrent=RecurrentNames(
        "linear_attn",
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    ignored=("mtp.",),
)

GEMMA3_FAMILY = Family(
    names=SANDWICH,
    fields=GEMMA_FIELDS,
    defaults=GEMMA3,
    layer_types=full_every(6),
    qk_norm=QkNorm.HEAD,
    norm_weight_offset=1.0,
    norm_rounds_once=True,
    activation=Activation.GELU_TANH,
    has_local_rope=True,
    scales_embedding=True,
)
GEMMA3N_FAMILY = Family(
    names=SANDWICH,
    fields=GEMMA_FIELDS | GEMMA3N_FIELDS,
    defaults=GEMMA3N,
    rename=gemma3n_fields,
    layer_types=full_every(5),
    dense_size=LARGEST_MLP,
    qk_norm=QkNorm.HEAD,
    norm_rounds_once=True,
    activation=Activation.GELU_TANH,
    has_local_rope=True,
    scales_embedding=True,
    unlike_layers=gemma3n_layers,
    attention_scale=1.0,  # the norms of queries and keys have it
    norms_values=True,
    altup=altup,
)
GEMMA4_FAMILY = Family(
    names=replace(SANDWICH, experts=GEMMA4_EXPERTS),
    fields=GEMMA_FIELDS | GEMMA4_FIELDS,
    defaults=GEMMA4,
    layer_types=gemma4_types,
    qk_norm=QkNorm.HEAD,
    norm_rounds_once=True,
    activation=Activation.GELU_TANH,
    scales_embedding=True,
    unlike_layers=gemma4_layers,
    attention_scale=1.0,  # the norms of queries and keys have it
    norms_values=True,
    has_layer_scale=True,
    moe=gemma4_moe,
    dense_layers=dense_everywhere,
)
GEMMA4_UNIFIED_FAMILY = replace(
    GEMMA4_FAMILY,
    defaults={
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "use_bidirectional_attention": "vision",
    },
)
LLAMA_FAMILY = Family(fields=BIAS | {"mlp_bias"})
QWEN2_FAMILY = Family(
    layer_types=window_from_layer,
    defaults={"sliding_window": 4096},
    has_qkv_bias=True,
    has_output_bias=False,
)
QWEN3_FAMILY = Family(
    fields=BIAS,
    layer_types=window_from_layer,
    defaults={"head_dim": 128, "sliding_window": 4096},
    qk_norm=QkNorm.HEAD,
)
MISTRAL_FAMILY = Family(
    fields=frozenset({"llama_4_scaling_beta"}),
    layer_types=window_everywhere,
    defaults=MISTRAL,
    text_defaults={"ministral3": MINISTRAL},
    has_qkv_bias=False,
    has_output_bias=False,
    temperature=ministral_temperature,
)
GLM_FAMILY = Family(
    names=FUSED_MLP,
    fields=BIAS | PARTIAL,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    is_rope_interleaved=True,
    has_output_bias=False,
)
COHERE_FAMILY = Family(
    names=TensorNames(mlp_norm=""),
    fields=BIAS | {"logits_scaling"},
    excluding="use_qk_norm",
    defaults=COHERE,
    rename=cohere_fields,
    norm_rounds_once=True,
    has_layer_norms=True,
    has_parallel_mlp=True,
    is_rope_interleaved=True,
)
LLAMA4_FAMILY = Family(
    names=TensorNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        experts=LLAMA4_EXPERTS,
    ),
    fields=EXPERTS
    | BIAS
    | {
        "no_rope_layers",
        "use_qk_norm",
        "attention_chunk_size",
        "attn_temperature_tuning",
        "interleave_moe_layer_step",
        "moe_layers",
    },
    defaults=LLAMA4,
    layer_types=chunks_with_rope,
    lacks_rope=layers_without_rope,
    qk_norm=QkNorm.UNWEIGHTED,
    is_rope_interleaved=True,
    moe=llama4_moe,
    dense_layers=dense_outside_listed,
    dense_size="intermediate_size_mlp",
    temperature=llama4_temperature,
)
DEEPSEEK_V3_FAMILY = Family(
    names=TensorNames(experts=SHARED_EXPERTS),
    fields=EXPERTS | GLM_EXPERTS | {"kv_lora_rank", "rope_interleave"},
    defaults=DEEPSEEK_V3,
    is_rope_interleaved="rope_interleave",
    has_qkv_bias=False,
    has_output_bias=False,
    has_latent=True,
    moe=deepseek_v3_moe,
    dense_layers=dense_at_first,
)
LFM2_FAMILY = Family(
    names=TensorNames(
        output="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        input_norm="operator_norm",
        mlp_norm="ffn_norm",
        norm="embedding_norm",
        recurrent=RecurrentNames("conv", ("conv.in_proj",)),
    ),
    defaults=LFM2,
    rename=lfm2_fields,
    layer_types=linear_where_listed,
    qk_norm=QkNorm.HEAD,
    recurrent=short_conv,
)
QWEN3_NEXT_FAMILY = Family(
    names=QWEN3_NEXT_NAMES,
    fields=RECURRENT | EXPERTS | SPARSE_LAYERS | {"shared_expert_intermediate_size"},
    defaults=QWEN3_NEXT,
    layer_types=linear_between_full,
    qk_norm=QkNorm.HEAD,
    norm_weight_offset=1.0,
    norm_rounds_once=True,
    has_output_gate=True,
    recurrent=delta_rule,
    moe=qwen2_moe,
    dense_layers=dense_of_step,
)
QWEN3_5_FAMILY = replace(
    QWEN3_NEXT_FAMILY,
    names=QWEN3_5_NAMES,
    fields=RECURRENT,
    defaults=QWEN3_5,
    moe=None,
    dense_layers=None,
)
QWEN3_5_MOE_FAMILY = replace(
    QWEN3_NEXT_FAMILY,
    names=replace(QWEN3_5_NAMES, experts=QWEN3_5_EXPERTS),
    defaults=QWEN3_5_MOE,
    moe=qwen3_5_moe,
)


def _with_images(family: Family, defaults: Mapping[str, object] | None = None) -> Family:
    """Return a text model as a part of a model that also takes images."""
    ignored = (
        "visual.",
        "model.visual.",
        "vision_tower.",
        "model.vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
        "model.vision_model.",
        "model.connector.",
        "model.vision_embedder.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    )
    names = replace(
        family.names,
        models=("model.language_model", "language_model.model", "model.text_model", "model"),
        heads=("lm_head", "language_model.lm_head", "lm_head", "lm_head"),
        ignored=(*family.names.ignored, *ignored),
    )
    defaults = {**family.defaults, **(defaults or {})}
    return replace(family, names=names, defaults=defaults, has_text_config=True)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": LLAMA_FAMILY,
    "Idefics3ForConditionalGeneration": _with_images(LLAMA_FAMILY, LLAMA),
    "SmolVLMForConditionalGeneration": _with_images(LLAMA_FAMILY, LLAMA),
    "MistralForCausalLM": MISTRAL_FAMILY,
    "MinistralForCausalLM": MISTRAL_FAMILY,
    "Mistral3ForConditionalGeneration": _with_images(MISTRAL_FAMILY),
    "Ministral3ForCausalLM": replace(MISTRAL_FAMILY, defaults=MINISTRAL),
    "Qwen2ForCausalLM": QWEN2_FAMILY,
    "Qwen2VLForConditionalGeneration": _with_images(QWEN2_FAMILY, QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": _with_images(QWEN2_FAMILY, QWEN2_VL),
    "Qwen3ForCausalLM": QWEN3_FAMILY,
    "Qwen3VLForConditionalGeneration": _with_images(QWEN3_FAMILY, QWEN3_VL),
    "Gemma2ForCausalLM": Family(
        names=SANDWICH,
        fields=GEMMA_FIELDS,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "hidden_activation": Activation.GELU_TANH.value,
        },
        layer_types=full_every(2),
        norm_weight_offset=1.0,
        norm_rounds_once=True,
        activation=Activation.GELU_TANH,
        scales_embedding=True,
    ),
    "Gemma3ForCausalLM": GEMMA3_FAMILY,
    "Gemma3ForConditionalGeneration": replace(
        _with_images(GEMMA3_FAMILY), sees_whole_pictures=True
    ),
    "Gemma3nForCausalLM": GEMMA3N_FAMILY,
    "Gemma3nForConditionalGeneration": _with_images(GEMMA3N_FAMILY),
    "Gemma4ForCausalLM": GEMMA4_FAMILY,
    "Gemma4ForConditionalGeneration": _with_images(GEMMA4_FAMILY),
    "Gemma4UnifiedForConditionalGeneration": _with_images(GEMMA4_UNIFIED_FAMILY),
    "Phi3ForCausalLM": Family(
        names=replace(FUSED_MLP, qkv=("self_attn.qkv_proj",)),
        fields=PARTIAL,
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        layer_types=window_everywhere,
        has_qkv_bias=False,
        has_output_bias=False,
    ),
    "GlmForCausalLM": GLM_FAMILY,
    "Glm4ForCausalLM": replace(
        GLM_FAMILY,
        names=replace(
            FUSED_MLP,
            attention_norm="post_self_attn_layernorm",
            mlp_output_norm="post_mlp_layernorm",
        ),
    ),
    "GraniteForCausalLM": Family(
        fields=GRANITE_FIELDS | {"mlp_bias"}, defaults={"attention_multiplier": 1.0}
    ),
    "Olmo2ForCausalLM": Family(
        names=POST_NORM,
        fields=BIAS,
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=QkNorm.ALL_HEADS,
        norm_rounds_once=True,
    ),
    "Olmo3ForCausalLM": Family(
        names=POST_NORM,
        fields=BIAS,
        defaults={"sliding_window": 4096, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
        layer_types=full_every(4),
        qk_norm=QkNorm.ALL_HEADS,
        norm_rounds_once=True,
        has_local_rope=True,
    ),
    "OlmoHybridForCausalLM": Family(
        names=replace(
            POST_NORM,
            recurrent=RecurrentNames(
                "linear_attn",
                tuple(f"linear_attn.{part}_proj" for part in "qkvg"),
                ("linear_attn.b_proj", "linear_attn.a_proj"),
                last_projection="o_proj",
                others={
                    "conv1d.weight": tuple(f"{part}_conv1d.weight" for part in "qkv"),
                    "norm.weight": ("o_norm.weight",),
                },
                norms=NormNames("input_layernorm", "", "post_attention_layernorm", ""),
            ),
            spellings={
                "input_layernorm": "attention_layer_norm",
                "post_attention_layernorm": "feedforward_layer_norm",
            },
        ),
        fields=BIAS | DELTA_FIELDS | {"linear_allow_neg_eigval"},
        defaults={"linear_conv_kernel_dim": 4},
        layer_types=linear_between_full,
        qk_norm=QkNorm.ALL_HEADS,
        norm_rounds_once=True,
        lacks_rope=all_without_theta,
        recurrent=olmo_delta_rule,
    ),
    "Exaone4ForCausalLM": Family(
        names=POST_NORM,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "rms_norm_eps": 1e-5},
        layer_types=full_every_fourth,
        lacks_rope=full_without_rope,
        qk_norm=QkNorm.HEAD,
    ),
    "CohereForCausalLM": COHERE_FAMILY,
    "Cohere2ForCausalLM": replace(
        COHERE_FAMILY,
        defaults={**COHERE, "sliding_window": 4096},
        layer_types=full_every(4),
        lacks_rope=full_without_rope,
    ),
    "Ernie4_5ForCausalLM": Family(
        defaults={**ERNIE, "head_dim": 128, "num_key_value_heads": 2},
        is_rope_interleaved=True,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        names=TensorNames(experts=ERNIE_EXPERTS, ignored=("model.mtp_",)),
        fields=EXPERTS,
        defaults=ERNIE_MOE,
        is_rope_interleaved=True,
        moe=ernie_moe,
        dense_layers=dense_outside_range,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        names=TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        fields=BIAS | {"alpha", "use_qk_norm"},
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=QkNorm.ROTATED,
    ),
    "SmolLM3ForCausalLM": Family(
        fields=BIAS | {"mlp_bias", "no_rope_layers"},
        defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        layer_types=window_without_rope,
        lacks_rope=layers_without_rope,
    ),
    "SeedOssForCausalLM": Family(
        fields=BIAS | {"mlp_bias", "attention_out_bias"},
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True},
        has_output_bias="attention_out_bias",
    ),
    "Qwen2MoeForCausalLM": Family(
        names=TensorNames(experts=SHARED_GATED_EXPERTS),
        fields=EXPERTS | SPARSE_LAYERS | {"qkv_bias", "shared_expert_intermediate_size"},
        defaults={"sliding_window": 4096, "qkv_bias": True},
        layer_types=window_alternating,
        has_qkv_bias="qkv_bias",
        has_output_bias=False,
        moe=qwen2_moe,
        dense_layers=dense_of_step,
    ),
    "Qwen3MoeForCausalLM": Family(
        names=TensorNames(experts=QWEN_EXPERTS),
        fields=EXPERTS | SPARSE_LAYERS | BIAS,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
        layer_types=window_if_used,
        qk_norm=QkNorm.HEAD,
        moe=qwen3_moe,
        dense_layers=dense_of_step,
    ),
    "Qwen3VLMoeForConditionalGeneration": _with_images(
        Family(
            names=TensorNames(experts=QWEN3_VL_EXPERTS),
            fields=EXPERTS | SPARSE_LAYERS | BIAS,
            defaults=QWEN3_VL_MOE,
            qk_norm=QkNorm.HEAD,
            moe=qwen3_vl_moe,
            dense_layers=dense_of_step,
        )
    ),
    "Qwen3NextForCausalLM": QWEN3_NEXT_FAMILY,
    "Qwen3_5ForCausalLM": QWEN3_5_FAMILY,
    "Qwen3_5ForConditionalGeneration": _with_images(QWEN3_5_FAMILY),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE_FAMILY,
    "Qwen3_5MoeForConditionalGeneration": _with_images(QWEN3_5_MOE_FAMILY),
    "MixtralForCausalLM": Family(
        names=TensorNames(experts=MIXTRAL_EXPERTS),
        fields=EXPERTS,
        defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
        layer_types=window_everywhere,
        has_qkv_bias=False,
        has_output_bias=False,
        moe=mixtral_moe,
    ),
    "MiniMaxM2ForCausalLM": Family(
        names=TensorNames(experts=MINIMAX_EXPERTS),
        fields=EXPERTS | PARTIAL | {"rotary_dim", "use_qk_norm"},
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "rope_theta": 5_000_000.0,
        },
        qk_norm=QkNorm.ALL_HEADS,
        moe=minimax_moe,
    ),
    "OlmoeForCausalLM": Family(
        names=TensorNames(experts=QWEN_EXPERTS),
        fields=EXPERTS | BIAS,
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=QkNorm.ALL_HEADS,
        moe=olmoe_moe,
    ),
    "GraniteMoeForCausalLM": Family(
        names=TensorNames(experts=GRANITE_EXPERTS),
        fields=EXPERTS | GRANITE_FIELDS,
        defaults={"attention_multiplier": 1.0},
        moe=granite_moe,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        names=TensorNames(
            gate_up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            experts=GRANITE_SHARED_EXPERTS,
        ),
        fields=EXPERTS
        | GRANITE_FIELDS
        | MAMBA_FIELDS
        | {"shared_intermediate_size", "position_embedding_type"},
        defaults=GRANITE_HYBRID,
        layer_types=linear_where_listed,
        lacks_rope=all_without_rope,
        recurrent=mamba2,
        moe=granite_shared_moe,
        dense_layers=dense_without_experts,
        dense_size="shared_intermediate_size",
    ),
    "BambaForCausalLM": Family(
        names=TensorNames(
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            mlp_norm="pre_ff_layernorm",
            norm="final_layernorm",
        ),
        fields=BIAS | PARTIAL | MAMBA_FIELDS | {"mlp_bias"},
        defaults=BAMBA,
        layer_types=linear_outside_indices,
        recurrent=mamba2,
    ),
    "FalconH1ForCausalLM": Family(
        names=TensorNames(
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            mlp_norm="pre_ff_layernorm",
            norm="final_layernorm",
        ),
        fields=MAMBA_FIELDS | {"attention_multiplier", "embedding_multiplier", "logits_scaling"},
        defaults=FALCON_H1,
        rename=falcon_h1_fields,
        has_qkv_bias=False,
        has_output_bias=False,
        recurrent=mamba2,
        unlike_layers=parallel_everywhere,
        row_scales=falcon_h1_scales,
    ),
    "NemotronHForCausalLM": Family(
        names=NEMOTRON_H_NAMES,
        fields=EXPERTS | GLM_EXPERTS,
        defaults=NEMOTRON_H,
        rename=nemotron_h_fields,
        layer_types=linear_where_listed,
        norm_rounds_once=True,
        activation=Activation.SQUARED_RELU,
        has_qkv_bias=False,
        has_output_bias=False,
        lacks_rope=no_rope,
        recurrent=nemotron_h_mamba,
        moe=nemotron_h_moe,
        dense_layers=dense_of_blocks,
        unlike_layers=nemotron_h_layers,
    ),
    "Lfm2ForCausalLM": LFM2_FAMILY,
    "Lfm2MoeForCausalLM": replace(
        LFM2_FAMILY,
        names=replace(LFM2_FAMILY.names, experts=LFM2_EXPERTS),
        fields=EXPERTS | {"first_k_dense_replace", "routed_scaling_factor"},
        defaults=LFM2_MOE,
        rename=lfm2_moe_fields,
        moe=lfm2_moe,
        dense_layers=dense_at_first,
    ),
    "GptOssForCausalLM": Family(
        names=TensorNames(experts=OPENAI_EXPERTS),
        fields=EXPERTS | BIAS | {"swiglu_alpha", "swiglu_limit"},
        defaults=GPT_OSS,
        layer_types=full_every(2),
        norm_rounds_once=True,
        activation=Activation.CLAMPED_SWIGLU,
        has_sinks=True,
        moe=gpt_oss_moe,
    ),
    "Glm4MoeForCausalLM": Family(
        names=TensorNames(experts=SHARED_EXPERTS),
        fields=EXPERTS | GLM_EXPERTS | BIAS | PARTIAL | {"use_qk_norm"},
        defaults={
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        qk_norm="use_qk_norm",
        has_output_bias=False,
        moe=glm4_moe,
        dense_layers=dense_at_first,
    ),
    "DeepseekV2ForCausalLM": Family(
        names=TensorNames(experts=UNCORRECTED_SHARED_EXPERTS),
        fields=EXPERTS | GLM_EXPERTS | {"kv_lora_rank"},
        defaults=DEEPSEEK_V2,
        is_rope_interleaved=True,
        has_qkv_bias=False,
        has_output_bias=False,
        has_latent=True,
        moe=deepseek_v2_moe,
        dense_layers=dense_at_first,
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3_FAMILY,
    "KimiLinearForCausalLM": Family(
        names=TensorNames(
            experts=KIMI_EXPERTS,
            recurrent=RecurrentNames(
                "self_attn",
                tuple(f"self_attn.{part}_proj" for part in "qkv"),
                ("self_attn.b_proj",),
                (
                    ("self_attn.g_a_proj", "self_attn.g_b_proj"),
                    ("self_attn.f_a_proj", "self_attn.f_b_proj"),
                ),
                last_projection="o_proj",
                others={
                    "conv1d.weight": tuple(f"{part}_conv1d.weight" for part in "qkv"),
                    "norm.weight": ("o_norm.weight",),
                },
            ),
            spellings={  # of transformers 5
                f"mlp.{part}_proj": f"block_sparse_moe.{part}_proj"
                for part in ("gate", "up", "down")
            },
        ),
        fields=EXPERTS | GLM_EXPERTS | {"kv_lora_rank", "linear_conv_kernel_dim"},
        defaults=KIMI_LINEAR,
        rename=kimi_fields,
        layer_types=linear_where_listed,
        lacks_rope=no_rope,
        has_qkv_bias=False,
        has_output_bias=False,
        has_latent=True,
        recurrent=kimi_delta,
        moe=glm4_moe,
        dense_layers=dense_where_listed,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK_V3_FAMILY, defaults=GLM4_LITE, dense_layers=dense_where_listed
    ),
    "Llama4ForCausalLM": LLAMA4_FAMILY,
    "Llama4ForConditionalGeneration": _with_images(LLAMA4_FAMILY),
}
