"""Small models of architectures that Baton does not know, which run on transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.models import Variant

# With tied embeddings, a random model repeats its last token.
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# The windows are shorter than the prompts of the tests.
UNKNOWN: Mapping[str, Variant] = {
    "biogpt": Variant("BioGpt", UNTIED),
    "cohere": Variant("Cohere", {**UNTIED, "logit_scale": 0.25, "use_qk_norm": True}),
    "diffllama": Variant("DiffLlama"),
    "gemma": Variant("Gemma", {**UNTIED, "head_dim": 32}),
    "gpt2": Variant(
        "GPT2", {**UNTIED, "scale_attn_by_inverse_layer_idx": True}, model_class="GPT2LMHeadModel"
    ),
    "gpt-bigcode": Variant("GPTBigCode", {**UNTIED, "n_inner": 96}),
    "gpt-neox": Variant("GPTNeoX", {"rotary_pct": 0.25}),
    "nemotron": Variant("Nemotron"),
    "olmo": Variant("Olmo", {"clip_qkv": 1.5}),
    "opt": Variant("OPT", {**UNTIED, "ffn_dim": 96, "word_embed_proj_dim": 32, "init_std": 0.25}),
    "persimmon": Variant("Persimmon", {"initializer_range": 0.5}),
    "phi": Variant("Phi", {"initializer_range": 0.5}),
    "phimoe": Variant("Phimoe", {**EXPERTS, "sliding_window": 24}),
    "stablelm": Variant("StableLm", {"qk_layernorm": True, "initializer_range": 0.5}),
    "starcoder2": Variant("Starcoder2", {**UNTIED, "sliding_window": 24}),
    "vaultgemma": Variant(
        "VaultGemma",
        {**UNTIED, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    ),
}
