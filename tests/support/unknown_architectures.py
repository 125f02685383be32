"""Small models of architectures that Baton does not know, which run on transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.models import Variant

# With tied embeddings, a random model repeats its last token.
UNTIED = {"tie_word_embeddings": False}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
IMAGES = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "crop_size": 28}
AUDIO = {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2}
SOUNDS = {"input_size": 8, "nemo_conv_channels": 16, "ext_pw_out_channel": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
TRAINED_LEN = 128


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


def _longrope(num_factors: int, **settings: Any) -> dict[str, Any]:
    return _rope(
        "longrope",
        original_max_position_embeddings=TRAINED_LEN,
        short_factor=[1.0 + i / 10 for i in range(num_factors)],
        long_factor=[2.0 + i / 3 for i in range(num_factors)],
        **settings,
    )


# The windows are shorter than the prompts of the tests. DiffLlama attends twice in a layer, MiMo's
# layers have unlike heads and sinks, and MiniCPM3's keys and values have unlike sizes.
UNKNOWN: Mapping[str, Variant] = {
    "arcee-dynamic": Variant(
        "Arcee", {"max_position_embeddings": TRAINED_LEN, **_rope("dynamic", factor=4.0)}
    ),
    "biogpt": Variant("BioGpt", UNTIED),
    "cohere": Variant("Cohere", {**UNTIED, "logit_scale": 0.25, "use_qk_norm": True}),
    "diffllama": Variant("DiffLlama"),
    "gemma": Variant("Gemma", {**UNTIED, "head_dim": 32}),
    "gpt2": Variant(
        "GPT2", {**UNTIED, "scale_attn_by_inverse_layer_idx": True}, model_class="GPT2LMHeadModel"
    ),
    "gpt-bigcode": Variant("GPTBigCode", {**UNTIED, "n_inner": 96}),
    "gpt-neox": Variant("GPTNeoX", {"rotary_pct": 0.25}),
    "granite-swa": Variant("GraniteSWA", {"sliding_window": 24, "num_hidden_layers": 3}),
    "mimo-v2": Variant(
        "MiMoV2Flash",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "v_head_dim": 20,
            "sliding_window": 24,
            "num_hidden_layers": 3,
        },
    ),
    "minicpm3": Variant(
        "MiniCPM3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
        },
    ),
    "nemotron": Variant("Nemotron"),
    "olmo": Variant("Olmo", {"clip_qkv": 1.5}),
    "opt": Variant("OPT", {**UNTIED, "ffn_dim": 96, "word_embed_proj_dim": 32, "init_std": 0.25}),
    "persimmon": Variant("Persimmon", {"initializer_range": 0.5}),
    "phi": Variant("Phi", {"initializer_range": 0.5}),
    "phi4-multimodal": Variant(
        "Phi4Multimodal",
        {
            "vision_config": {**VISION, **IMAGES},
            "audio_config": {**AUDIO, **SOUNDS},
            "original_max_position_embeddings": TRAINED_LEN,
            **_longrope(6, partial_rotary_factor=0.75),
        },
    ),
    "phimoe": Variant("Phimoe", {**EXPERTS, "sliding_window": 24, **_longrope(8, **MSCALES)}),
    "stablelm": Variant("StableLm", {"qk_layernorm": True, "initializer_range": 0.5}),
    "starcoder2": Variant("Starcoder2", {**UNTIED, "sliding_window": 24}),
    "vaultgemma": Variant(
        "VaultGemma",
        {**UNTIED, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    ),
}
