"""Shapes of published models, for folders with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Fields = Mapping[str, object]  # of config.json

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Config of a published model, and the size that a folder has by default."""

    config: Fields
    layers: int | None = None  # None: as many as the published model
    experts: int | None = None

    @property
    def published_layers(self) -> int:
        return _count(self.config, "num_hidden_layers")

    @property
    def published_experts(self) -> int | None:
        name = _expert_field(self.config)
        return None if name is None else _count(self.config, name)

    def describe(self) -> str:
        """Return the default size next to that of the published model."""
        text = f"{self.layers or self.published_layers} of {self.published_layers} layers"
        if self.published_experts is None:
            return text
        return (
            f"{text}, {self.experts or self.published_experts} of {self.published_experts} experts"
        )

    def scale(self, layers: int | None = None, experts: int | None = None) -> dict[str, object]:
        """Return the config with this number of layers and experts. Raises ValueError."""
        config = {
            **self.config,
            "num_hidden_layers": layers or self.layers or self.published_layers,
        }
        layer_types = config.get("layer_types")
        if isinstance(layer_types, list):
            config["layer_types"] = layer_types[: _count(config, "num_hidden_layers")]
        field = _expert_field(config)
        if field is None:
            if experts is not None:
                raise ValueError("this model has no experts")
            return config
        config[field] = experts or self.experts or self.published_experts
        if _count(config, field) < _count(config, "num_experts_per_tok"):
            raise ValueError(f"a token has {config['num_experts_per_tok']} experts: use as many")
        return config


def _expert_field(config: Fields) -> str | None:
    return next((name for name in EXPERT_FIELDS if name in config), None)


def _count(config: Fields, name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHAPES: Mapping[str, ModelShape] = {
    "qwen3-0.6b": ModelShape(
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        }
    ),
    "qwen3-1.7b": ModelShape(
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        }
    ),
    "llama3.2-1b": ModelShape(
        {
            **LLAMA3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    ),
    "llama3.1-8b": ModelShape(
        {
            **LLAMA3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        layers=4,
    ),
    "gemma3-1b": ModelShape(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "rope_local_base_freq": 10_000,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
    ),
    "phi4-mini": ModelShape(
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75,
            "rope_theta": 10_000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [1.0 + dimension / 4 for dimension in range(48)],
            },
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "sliding_window": 262144,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "pad_token_id": 199999,
        },
        layers=16,
    ),
    "smollm3-3b": ModelShape(
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "bos_token_id": 128000,
            "eos_token_id": 128012,
            "pad_token_id": 128004,
        },
        layers=20,
    ),
    "qwen3-30b-a3b": ModelShape(
        {
            **QWEN3,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        layers=4,
        experts=64,
    ),
    "mixtral-8x7b": ModelShape(
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        layers=1,
    ),
    "deepseek-v2-lite": ModelShape(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": 100000,
            "eos_token_id": 100001,
        },
        layers=6,
        experts=16,
    ),
    "qwen3-next-80b-a3b": ModelShape(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000_000,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        layers=4,
        experts=64,
    ),
    "granite-4.0-h-tiny": ModelShape(
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "vocab_size": 100352,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 40,
            "layer_types": [
                "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
            ],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12,
            "logits_scaling": 6,
            "residual_multiplier": 0.22,
            "position_embedding_type": "nope",
            "normalization_function": "rmsnorm",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "bos_token_id": 100257,
            "eos_token_id": 100257,
        },
        layers=10,
    ),
    "gpt-oss-20b": ModelShape(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": 199998,
            "eos_token_id": 200002,
            "pad_token_id": 199999,
        },
        layers=4,
        experts=8,
    ),
}
