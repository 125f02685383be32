"""Values of config fields that transformers leaves out of a nested `text_config`, by family."""

from __future__ import annotations

from collections.abc import Mapping

from baton.engine.runner.model.config import Activation

GEMMA4: Mapping[str, object] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "hidden_activation": Activation.GELU_TANH.value,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
LLAMA: Mapping[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
MINISTRAL_ROPE: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL: Mapping[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
MINISTRAL: Mapping[str, object] = {
    **MISTRAL,
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": MINISTRAL_ROPE,
    "sliding_window": None,
}
GEMMA3: Mapping[str, object] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "hidden_activation": Activation.GELU_TANH.value,
}
LLAMA4: Mapping[str, object] = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}
QWEN2_VL: Mapping[str, object] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
QWEN3_VL: Mapping[str, object] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
QWEN3_VL_MOE: Mapping[str, object] = {
    **QWEN3_VL,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
QWEN3_NEXT: Mapping[str, object] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
QWEN3_5: Mapping[str, object] = {
    **QWEN3_NEXT,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
QWEN3_5_MOE: Mapping[str, object] = {
    **QWEN3_NEXT,
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
DEEPSEEK_LATENT: Mapping[str, object] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V2: Mapping[str, object] = {
    **DEEPSEEK_LATENT,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "topk_method": "greedy",
}
DEEPSEEK_V3: Mapping[str, object] = {
    **DEEPSEEK_LATENT,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
KIMI_LINEAR: Mapping[str, object] = {
    **DEEPSEEK_LATENT,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
}
GLM4_LITE: Mapping[str, object] = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 20,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "routed_scaling_factor": 1.8,
}
ERNIE: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
ERNIE_MOE: Mapping[str, object] = {
    **ERNIE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
}
GRANITE_HYBRID: Mapping[str, object] = {
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
BAMBA: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
COHERE: Mapping[str, object] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
FALCON_H1: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_rms_norm": False,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
LFM2: Mapping[str, object] = {
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
}
LFM2_MOE: Mapping[str, object] = {
    **LFM2,
    "block_auto_adjust_ff_dim": False,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
GPT_OSS: Mapping[str, object] = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
