"""A small model of each family, for golden tests. See `Variant` in tests/support/models.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.support.models import Towers, Variant

MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
# With tied and scaled embeddings, a random model repeats its last token.
UNTIED = {"tie_word_embeddings": False}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
IMAGES = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
PROJECTED = {
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    # The norms of latent attention have an epsilon of their own.
    "rms_norm_eps": 1e-2,
}
LATENT_YARN = {"factor": 8.0, "original_max_position_embeddings": 64}


# The windows and chunks are shorter than the prompts of the tests.
DENSE: Mapping[str, Variant] = {
    "gemma2": Variant(
        "Gemma2",
        {**UNTIED, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    ),
    "gemma3": Variant(
        "Gemma3Text",
        {
            **UNTIED,
            "head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            },
        },
        model_class="Gemma3ForCausalLM",
    ),
    # Streams of AltUp, sparse gates, MLPs of unlike sizes; the last three layers read the keys and
    # values of earlier ones. The last tokens have no input per layer of their own.
    "gemma3n": Variant(
        "Gemma3nText",
        {
            **UNTIED,
            "head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 7,
            "layer_types": [
                *["sliding_attention"] * 2,
                *["full_attention", "sliding_attention"] * 2,
                "full_attention",
            ],
            "num_kv_shared_layers": 3,
            "intermediate_size": [96, 64, *[96] * 5],
            "activation_sparsity_pattern": [0.8, 0.6, 0.9, *[0.0] * 4],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 300,
            "laurel_rank": 12,
            "final_logit_softcapping": 30.0,
        },
        model_class="Gemma3nForCausalLM",
    ),
    # Layers of unlike heads; the last three read the keys and values of earlier ones.
    "gemma4": Variant(
        "Gemma4Text",
        {
            **UNTIED,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 7,
            "layer_types": [
                *["sliding_attention"] * 2,
                *["full_attention", "sliding_attention"] * 2,
                "full_attention",
            ],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 384,
            "final_logit_softcapping": 30.0,
        },
        model_class="Gemma4ForCausalLM",
    ),
    # Full attention with fewer and larger heads, whose values are its keys.
    "gemma4-k-eq-v": Variant(
        "Gemma4Text",
        {
            **UNTIED,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
        },
        model_class="Gemma4ForCausalLM",
    ),
    "gemma4-moe": Variant(
        "Gemma4Text",
        {
            **UNTIED,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        model_class="Gemma4ForCausalLM",
    ),
    "phi3": Variant("Phi3", {"sliding_window": 24}),
    "phi4-mini": Variant(
        "Phi3",
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            **_rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0 + i / 10 for i in range(6)],
                long_factor=[2.0 + i / 3 for i in range(6)],
            ),
        },
    ),
    "glm": Variant("Glm", {"head_dim": 32}),
    "glm4": Variant("Glm4", {"head_dim": 32}),
    "granite": Variant("Granite", MULTIPLIERS),
    "olmo2": Variant("Olmo2"),
    "olmo3": Variant("Olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
    "exaone4": Variant("Exaone4", {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 4}),
    "cohere": Variant("Cohere", {"logit_scale": 0.3}),
    "cohere2": Variant(
        "Cohere2", {"sliding_window": 24, "num_hidden_layers": 4, "logit_scale": 0.3}
    ),
    "ernie4.5": Variant("Ernie4_5", {"head_dim": 32}),
    "hunyuan": Variant(
        "HunYuanDenseV1", {"head_dim": 32, **_rope("dynamic", alpha=50.0, factor=1.0)}
    ),
    "smollm3": Variant("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "seed-oss": Variant("SeedOss", {"head_dim": 32, "attention_out_bias": True}),
    "ministral": Variant(
        "Ministral",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "ministral3": Variant(
        "Ministral3",
        {
            "head_dim": 32,
            **_rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=64,
                beta_fast=32.0,
                beta_slow=1.0,
                llama_4_scaling_beta=0.3,
            ),
        },
    ),
}
EXPERTS: Mapping[str, Variant] = {
    "qwen2-moe": Variant(
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3-moe": Variant(
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": Variant("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": Variant(
        "MiniMaxM2",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "olmoe": Variant("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "granite-moe": Variant(
        "GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, **MULTIPLIERS}
    ),
    "gpt-oss": Variant(
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            **_rope("yarn", factor=8.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    "glm4-moe": Variant(
        "Glm4Moe",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
        },
    ),
    "ernie4.5-moe": Variant(
        "Ernie4_5_Moe",
        {
            "head_dim": 32,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
        },
    ),
    # As in V2-Lite: queries in one step, experts without groups.
    "deepseek-v2-lite": Variant(
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            **_rope("yarn", **LATENT_YARN, mscale=0.7, mscale_all_dim=0.7),
        },
    ),
    # As in V2: low-rank queries, experts in groups that count by their best expert.
    "deepseek-v2": Variant(
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 36,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 1,
        },
    ),
    "deepseek-v3": Variant(
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 36,
            "n_group": 4,
            "topk_group": 2,
            **_rope("yarn", **LATENT_YARN, mscale=1.0, mscale_all_dim=0.8),
        },
    ),
    "glm4-moe-lite": Variant(
        "Glm4MoeLite",
        {
            **LATENT,
            "q_lora_rank": 36,
            "n_group": 4,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "llama4": Variant(
        "Llama4Text",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "num_hidden_layers": 4,
        },
        model_class="Llama4ForCausalLM",
    ),
}
# Text models within models that also take images.
WRAPPED: Mapping[str, Variant] = {
    "gemma3-vision": Variant("Gemma3", DENSE["gemma3"].settings, vision={**VISION, **IMAGES}),
    "gemma4-vision": Variant(
        "Gemma4",
        DENSE["gemma4"].settings,
        vision={**VISION, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8},
    ),
    "gemma4-unified": Variant(
        "Gemma4Unified",
        {
            name: value
            for name, value in DENSE["gemma4-k-eq-v"].settings.items()
            if name != "hidden_size_per_layer_input"
        },
        vision={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "output_proj_dims": 48,
            "mm_posemb_size": 100,
        },
    ),
    "mistral3": Variant(
        "Mistral3",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        vision={"model_type": "pixtral", "head_dim": 8, **VISION, **IMAGES},
    ),
    "qwen2.5-vl": Variant(
        "Qwen2_5_VL", _rope("default", mrope_section=[2, 3, 3]), vision=QWEN_VISION
    ),
    "qwen3-vl": Variant(
        "Qwen3VL",
        {"head_dim": 32, **_rope("default", mrope_section=[6, 5, 5], mrope_interleaved=True)},
        vision={**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3-vl-moe": Variant(
        "Qwen3VLMoe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            **_rope("default", mrope_section=[6, 5, 5], mrope_interleaved=True),
        },
        vision={**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "llama4-vision": Variant(
        "Llama4", EXPERTS["llama4"].settings, vision={**VISION, **IMAGES, **PROJECTED}
    ),
}
# Text models within others, whose towers transformers builds with timm.
WRAPPED_TEXT: Mapping[str, Variant] = {
    "gemma3n-towers": Variant(
        "Gemma3nText",
        {
            **DENSE["gemma3n"].settings,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
        },
        model_class="Gemma3nForCausalLM",
        towers=Towers(
            {
                "architectures": ["Gemma3nForConditionalGeneration"],
                "model_type": "gemma3n",
                "vision_config": {"architecture": "mobilenetv5_300m_enc"},
                "audio_config": {},
            },
            (
                "model.vision_tower.timm_model.conv_stem.conv.weight",
                "model.audio_tower.conformer.0.norm.weight",
                "model.embed_vision.embedding.weight",
                "model.embed_audio.embedding.weight",
            ),
        ),
    ),
}
# Plain families under another prefix.
WRAPPED_PLAIN: Mapping[str, Variant] = {
    "qwen2-vl": Variant(
        "Qwen2VL",
        WRAPPED["qwen2.5-vl"].settings,
        vision={"embed_dim": 32, "depth": 3, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
    ),
    **{
        name: Variant(
            family,
            {"model_type": "llama"},
            vision={**VISION, "num_hidden_layers": 3, "image_size": 64, "patch_size": 8},
        )
        for name, family in (("smolvlm", "SmolVLM"), ("idefics3", "Idefics3"))
    },
}
# Linear attention by the gated delta rule. The state takes several blocks.
DELTA = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
NEXT_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# Mamba2. With one group, as in Granite 4, and with two.
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "shared_intermediate_size": 80,
    **MULTIPLIERS,
}
NEMOTRON = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 20,
    "ssm_state_size": 24,
    "n_groups": 2,
    "time_step_min": 1e-30,
    "time_step_floor": 0.05,
}
RECURRENT: Mapping[str, Variant] = {
    "qwen3-next": Variant("Qwen3Next", {**DELTA, **NEXT_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": Variant(
        "Qwen3_5Text",
        {**DELTA, "layer_types": None, **_rope("default", **MROPE)},
        model_class="Qwen3_5ForCausalLM",
    ),
    "qwen3.5-moe": Variant(
        "Qwen3_5MoeText",
        {**DELTA, **NEXT_EXPERTS, **_rope("default", **MROPE)},
        model_class="Qwen3_5MoeForCausalLM",
    ),
    # Convolutions of equal sizes: transformers stores three equal parts of them.
    "olmo-hybrid": Variant(
        "OlmoHybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": DELTA["layer_types"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "kimi-linear": Variant(
        "KimiLinear",
        {
            "num_hidden_layers": 4,
            "layer_types": DELTA["layer_types"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_key_value_heads": 4,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
            "linear_num_heads": 4,
            "linear_head_dim": 20,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "lfm2": Variant(
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_multiple_of": 24,
        },
    ),
    "lfm2-moe": Variant(
        "Lfm2Moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "bamba": Variant(
        "Bamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 24,
            "mamba_n_groups": 2,
        },
    ),
    # Attention and Mamba2 in each layer, the latter without a norm.
    "falcon-h1": Variant(
        "FalconH1",
        {
            "head_dim": 32,
            "mamba_d_ssm": 160,
            "mamba_n_heads": 8,
            "mamba_d_head": 20,
            "mamba_d_state": 24,
            "mamba_n_groups": 2,
            "embedding_multiplier": 5.0,
            "lm_head_multiplier": 0.3,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "key_multiplier": 0.4,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.7, 0.5, 0.9, 1.2, 0.4],
            "mlp_multipliers": [0.9, 0.6],
        },
    ),
    # Mixers and MLPs are blocks: the second and third mixer have no MLP. transformers limits the
    # steps of a prompt, but not those of an answer, by `time_step_min`.
    "nemotron-h": Variant(
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "linear_attention", "mlp"),
                *("full_attention", "mlp", "linear_attention", "mlp"),
            ],
        },
    ),
    "nemotron-3": Variant(
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": [
                *("linear_attention", "moe", "linear_attention", "full_attention", "moe"),
                *("linear_attention", "mlp"),
            ],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 40,
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "granite-4": Variant("GraniteMoeHybrid", {**MAMBA, "num_local_experts": 0}),
    "granite-4-moe": Variant(
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "mamba_n_groups": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
        },
    ),
}
RECURRENT_WRAPPED: Mapping[str, Variant] = {
    "qwen3.5-vl": Variant("Qwen3_5", RECURRENT["qwen3.5"].settings, vision=QWEN_VISION),
    "qwen3.5-moe-vl": Variant("Qwen3_5Moe", RECURRENT["qwen3.5-moe"].settings, vision=QWEN_VISION),
}
# With a recurrent state.
STATE_VARIANTS: Mapping[str, Variant] = {**RECURRENT, **RECURRENT_WRAPPED}
# The delta rule and Mamba2, each with attention in the other one of two layers.
SHALLOW_STATE_VARIANTS: Mapping[str, Variant] = {
    name: replace(RECURRENT[name], settings={**RECURRENT[name].settings, **TWO_LAYERS})
    for name in ("qwen3.5", "granite-4")
}
FAMILY_VARIANTS: Mapping[str, Variant] = {
    **DENSE,
    **EXPERTS,
    **WRAPPED,
    "qwen3-next": RECURRENT["qwen3-next"],
    "qwen3.5": RECURRENT["qwen3.5"],
    "granite-4-moe": RECURRENT["granite-4-moe"],
}
