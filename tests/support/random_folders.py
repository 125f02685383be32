"""Small folders of `tools.make_model`: shapes of published models with other sizes."""

from __future__ import annotations

from pathlib import Path

from tools.make_model import make_model
from tools.model_shapes import SHAPES, Fields

SIZES: Fields = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERT_SIZES: Fields = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


LATENT_SIZES: Fields = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DELTA_SIZES: Fields = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
MAMBA_SIZES: Fields = {
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}


def small_config(shape: str, **fields: object) -> dict[str, object]:
    """Return the config of a shape with two layers and small sizes."""
    published = SHAPES[shape].config
    config = {**published, **SIZES, "num_hidden_layers": 2}
    config |= {name: size for name, size in EXPERT_SIZES.items() if name in published}
    if "kv_lora_rank" in published:
        config |= LATENT_SIZES
    if "linear_num_key_heads" in published:
        config |= DELTA_SIZES
    if "mamba_n_heads" in published:
        config |= MAMBA_SIZES
    if shape == "phi4-mini":
        factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
        config |= {"head_dim": 16, "rope_scaling": {"type": "longrope", **factors}}
    return {**config, **fields}


def small_folder(folder: Path, shape: str, dtype: str = "float32", **fields: object) -> Path:
    make_model(folder, small_config(shape, **fields), dtype)
    return folder
