"""Configurations of published models as they are read, and configurations that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import (
    LatentConfig,
    ModelConfig,
    QkNorm,
    QueryTemperature,
    Recurrence,
    RecurrentConfig,
    RopeConfig,
    Scoring,
)
from tests.support.hub_configs import HUB_CONFIGS

NO_ROPE = RopeConfig(kind="none")
LLAMA, GEMMA = HUB_CONFIGS["Llama-3.2-1B"], HUB_CONFIGS["gemma-3-4b"]
# Published in another dtype than bfloat16.
DTYPES = {"gemma-2-27b": "float32", "OLMo-2-1B": "float32", "aya-expanse-8b": "float16"}
DEEPSEEK = HUB_CONFIGS["DeepSeek-V3"]
FALCON_H1 = HUB_CONFIGS["Falcon-H1-0.5B"]
NEMOTRON = HUB_CONFIGS["Nemotron-3-Nano-30B-A3B"]
QWEN_MOE, PHI = HUB_CONFIGS["Qwen3-30B-A3B"], HUB_CONFIGS["Phi-4-mini"]


def read(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return read_model_config(SafetensorsFolder(folder))


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def layers_where(config: ModelConfig, **expected: Any) -> list[int]:
    """Return the layers that have these properties."""
    pairs = [[getattr(layer, name) for name in expected] for layer in config.layers]
    return [index for index, found in enumerate(pairs) if found == list(expected.values())]


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_published_configurations_are_read(name: str, tmp_path: Path) -> None:
    raw = HUB_CONFIGS[name]
    stated = raw.get("text_config", raw)

    config = read(tmp_path, raw)

    assert config.architecture == raw["architectures"][0]
    # A block with an MLP is not a layer of its own.
    num_mlps = sum(stated.get("hybrid_override_pattern", "").count(letter) for letter in "-E")
    assert config.num_layers == stated["num_hidden_layers"] - num_mlps
    assert config.hidden_size == stated["hidden_size"]
    assert config.dtype == DTYPES.get(name, "bfloat16")
    assert config.rotary_dim <= config.head_dim


# Attributes of the configuration that a model has and a plain Llama has not.
EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": {"ties_embeddings": True, "head_dim": 64, "moe": None},
    "Mistral-Small-3.1-24B": {"head_dim": 128, "ties_embeddings": False, "num_kv_heads": 8},
    "Ministral-3-3B": {"ties_embeddings": True, "head_dim": 128},
    "Qwen2.5-VL-3B": {
        "ropes": (RopeConfig(theta=1e6, sections=(16, 24, 24)),),
        "ties_embeddings": True,
        "has_qkv_bias": True,
        "has_output_bias": False,
    },
    "Qwen3-VL-4B": {
        "ropes": (RopeConfig(theta=5e6, sections=(24, 20, 20), are_sections_interleaved=True),),
        "rotary_dim": 128,
    },
    "gemma-2-27b": {
        "attention_scale": 1 / 12,
        "attention_softcap": 50.0,
        "logits_softcap": 30.0,
        "embedding_scale": math.sqrt(4608),
        "ties_embeddings": True,
    },
    "gemma-3-1b": {
        "ropes": (RopeConfig(theta=1e4), RopeConfig(theta=1e6)),
        "attention_softcap": None,
        "ties_embeddings": True,
    },
    "gemma-3-4b": {
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "attention_scale": 1 / 16,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gemma-3-27b": {"attention_scale": 1 / math.sqrt(168), "head_dim": 128},
    "Phi-4-mini": {"rotary_dim": 96, "head_dim": 128, "ties_embeddings": True},
    "Phi-3-mini-128k": {"rotary_dim": 96, "head_dim": 96},
    "glm-4-9b-chat-hf": {
        "rotary_dim": 64,
        "is_rope_interleaved": True,
        "has_qkv_bias": True,
        "has_output_bias": False,
    },
    "GLM-4-9B-0414": {"rotary_dim": 64, "head_dim": 128, "is_rope_interleaved": True},
    "granite-3.3-8b": {
        "attention_scale": 0.0078125,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logits_scale": 1 / 16,
    },
    "Seed-OSS-36B": {"has_qkv_bias": True, "has_output_bias": False, "head_dim": 128},
    "gpt-oss-20b": {
        "has_sinks": True,
        "has_output_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    "GLM-4.5-Air": {"rotary_dim": 64, "is_rope_interleaved": False, "has_qkv_bias": True},
    "DeepSeek-V2-Lite": {
        "latent": LatentConfig(None, 512, 128, 64, 128),
        "num_kv_heads": 1,
        "head_dim": 576,
        "rotary_dim": 64,
        "is_rope_interleaved": True,
        "attention_scale": 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2,
    },
    "Kimi-K2": {
        "latent": LatentConfig(1536, 512, 128, 64, 128),
        "head_dim": 576,
        "is_rope_interleaved": True,
        "attention_scale": 192**-0.5 * (0.1 * math.log(32) + 1) ** 2,
    },
    "GLM-4.7-Flash": {
        "latent": LatentConfig(768, 512, 192, 64, 256),
        "head_dim": 576,
        "is_rope_interleaved": True,
        "attention_scale": 1 / 16,
    },
    "Hunyuan-7B": {
        "ropes": (RopeConfig(theta=1e4 * 1000 ** (128 / 126)),),
        "max_position_embeddings": 262_144,
        "ties_embeddings": True,
    },
    "Bamba-9B-v2": {"rotary_dim": 64, "head_dim": 128},
    "Falcon-H1-0.5B": {
        "attention_scale": 0.39062499999999994 / 8,
        "embedding_scale": 5.656854249492381,
        "logits_scale": pytest.approx(0.0390625),
        "recurrent": RecurrentConfig(1, 24, 128, 64, 4, Recurrence.MAMBA2, has_norm=False),
        "attention_layers": tuple(range(36)),
        "recurrent_layers": tuple(range(36)),
    },
    "Kimi-Linear-48B-A3B": {
        "ropes": (NO_ROPE,),
        "latent": LatentConfig(None, 512, 128, 64, 128),
        "recurrent": RecurrentConfig(32, 32, 128, 128, 4, Recurrence.KIMI_DELTA),
        "attention_layers": (3, 7, 11, 15, 19, 23, 26),
        "max_position_embeddings": 1 << 20,
    },
    "LFM2-1.2B": {"ties_embeddings": True, "head_dim": 64},
    "Olmo-Hybrid-7B": {
        "ropes": (NO_ROPE,),
        "recurrent": RecurrentConfig(30, 30, 96, 192, 4, norm_epsilon=1e-5, strength_scale=2.0),
        "attention_layers": tuple(range(3, 32, 4)),
    },
    "MiniMax-M2": {"rotary_dim": 64, "head_dim": 128, "has_qkv_bias": False},
    "Llama-4-Scout-17B-16E": {"is_rope_interleaved": True, "ties_embeddings": False},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_properties_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config = read(tmp_path, HUB_CONFIGS[name])

    found = {attribute: getattr(config, attribute) for attribute in EXPECTED[name]}
    assert found == EXPECTED[name]


def test_windows_are_those_of_the_layers(tmp_path: Path) -> None:
    read_windows = {name: windows(read(tmp_path, raw)) for name, raw in HUB_CONFIGS.items()}

    assert read_windows["Mistral-7B-v0.1"] == [4096] * 32
    assert read_windows["Mistral-Small-3.1-24B"] == [None] * 40
    assert read_windows["Qwen2.5-7B-Instruct"] == [None] * 28
    assert read_windows["gemma-2-27b"] == [4096, None] * 23
    assert read_windows["gemma-3-4b"] == ([1024] * 5 + [None]) * 5 + [1024] * 4
    assert read_windows["gemma-3-1b"] == ([512] * 5 + [None]) * 4 + [512] * 2
    assert read_windows["Olmo-3-7B"] == ([4096] * 3 + [None]) * 8
    assert read_windows["EXAONE-4.0-32B"] == ([4096] * 3 + [None]) * 16
    assert read_windows["EXAONE-4.0-1.2B"] == [None] * 30
    assert read_windows["c4ai-command-r7b-12-2024"] == ([4096] * 3 + [None]) * 8
    assert read_windows["gpt-oss-20b"] == [128, None] * 12
    assert read_windows["Phi-3-mini-4k"] == [2047] * 32


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("Qwen3-30B-A3B", {}, [64, 64, 64, 64]),
        ("Qwen1.5-MoE-A2.7B", {"max_window_layers": 3}, [64, None, 64, None]),
        ("Qwen2.5-7B-Instruct", {"max_window_layers": 3}, [None, None, None, 64]),
        (
            "SmolLM3-3B",
            {"layer_types": None, "no_rope_layers": [1, 0, 1, 1]},
            [None, 64, None, None],
        ),
    ],
)
def test_enabled_windows_apply_to_the_layers_of_the_family(
    name: str, changes: Mapping[str, Any], expected: list[int | None], tmp_path: Path
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}

    assert windows(read(tmp_path, {**HUB_CONFIGS[name], **window, **changes})) == expected


def test_scaled_ropes_are_those_of_their_layers(tmp_path: Path) -> None:
    gemma = read(tmp_path, GEMMA)
    local, wide = (gemma.ropes[gemma.layers[layer].key_rope] for layer in (0, 5))
    assert local == RopeConfig(theta=1e4)
    assert (wide.kind, wide.theta, wide.factor) == ("linear", 1e6, 8.0)

    olmo = read(tmp_path, HUB_CONFIGS["Olmo-3-7B"])
    local, wide = (olmo.ropes[olmo.layers[layer].key_rope] for layer in (0, 3))
    assert local == RopeConfig(theta=5e5)
    assert (wide.kind, wide.factor, wide.attention_factor) == ("yarn", 8.0, 1.2079441541679836)

    gpt, phi, ministral = (
        read(tmp_path, HUB_CONFIGS[name]).ropes[0]
        for name in ("gpt-oss-20b", "Phi-3-mini-128k", "Ministral-3-3B")
    )
    assert (gpt.kind, gpt.theta, gpt.truncate) == ("yarn", 150_000.0, False)
    assert (phi.kind, phi.factor, len(phi.long_factors)) == ("longrope", 32.0, 48)
    assert ministral.temperature == QueryTemperature(16_384, 0.1)


def test_layers_without_rope_and_temperatures(tmp_path: Path) -> None:
    scout, maverick = (
        read(tmp_path, HUB_CONFIGS[name])
        for name in ("Llama-4-Scout-17B-16E", "Llama-4-Maverick-17B-128E")
    )
    bare = list(range(3, 48, 4))
    for config in (scout, maverick):
        assert layers_where(config, chunk=None) == bare
        assert layers_where(config, chunk=8192) == [i for i in range(48) if i not in bare]
        assert config.ropes[config.layers[3].key_rope] == NO_ROPE
        query_rope = config.ropes[config.layers[3].query_rope]
        assert query_rope.temperature == QueryTemperature(8192, 0.1, offset=1.0)
    assert layers_where(scout, qk_norm=QkNorm.UNWEIGHTED, mlp_size=0) == layers_where(
        scout, chunk=8192
    )
    assert layers_where(maverick, qk_norm=QkNorm.NONE, mlp_size=16_384) == list(range(0, 48, 2))
    assert layers_where(read(tmp_path, HUB_CONFIGS["SmolLM3-3B"]), key_rope=1) == list(
        range(3, 36, 4)
    )
    hybrid, plain = (
        read(tmp_path, HUB_CONFIGS[name]) for name in ("EXAONE-4.0-32B", "EXAONE-4.0-1.2B")
    )
    assert layers_where(hybrid, key_rope=hybrid.ropes.index(NO_ROPE)) == list(range(3, 64, 4))
    assert [rope.kind for rope in plain.ropes] == ["llama3"]
    command = read(tmp_path, HUB_CONFIGS["c4ai-command-r7b-12-2024"])
    assert layers_where(command, key_rope=command.ropes.index(NO_ROPE)) == list(range(3, 32, 4))
    assert (command.logits_scale, command.ties_embeddings) == (0.25, True)
    granite = read(tmp_path, HUB_CONFIGS["granite-4.0-h-tiny"])
    assert granite.ropes == (NO_ROPE,)
    assert granite.attention_layers == (5, 15, 25, 35)
    assert read(tmp_path, HUB_CONFIGS["Bamba-9B-v2"]).attention_layers == (9, 18, 27)
    lfm2 = read(tmp_path, HUB_CONFIGS["LFM2-1.2B"])
    assert lfm2.attention_layers == (2, 5, 8, 10, 12, 14)
    assert layers_where(lfm2, mlp_size=8192) == list(range(16))
    assert layers_where(read(tmp_path, HUB_CONFIGS["LFM2-8B-A1B"]), mlp_size=7168) == [0, 1]


def test_blocks_of_mixers_and_mlps_are_layers(tmp_path: Path) -> None:
    dense, experts = (
        read(tmp_path, HUB_CONFIGS[name])
        for name in ("Nemotron-Nano-9B-v2", "Nemotron-3-Nano-30B-A3B")
    )
    assert dense.moe is None
    assert [dense.layers[i].block for i in dense.attention_layers] == [14, 21, 30, 39]
    assert layers_where(dense, has_mlp=False, mlp_size=0) == [3, 7, 11, 16, 21, 24]
    assert len(layers_where(dense, mlp_size=15_680)) == 25
    assert len(layers_where(experts, has_experts=True)) == 23
    assert [experts.layers[i].block for i in experts.attention_layers] == [5, 12, 19, 26, 33, 42]
    assert experts.recurrent is not None
    assert (experts.recurrent.num_values, experts.ropes) == (4096, (NO_ROPE,))


def test_expert_settings_are_those_of_the_model(tmp_path: Path) -> None:
    found = {name: read(tmp_path, raw).moe for name, raw in HUB_CONFIGS.items()}
    sizes = {
        name: (moe.num_experts, moe.top_k, moe.expert_size, moe.shared_size, moe.normalizes)
        for name, moe in found.items()
        if moe is not None
    }

    assert sizes == {
        "Qwen1.5-MoE-A2.7B": (60, 4, 1408, 5632, False),
        "Qwen3-30B-A3B": (128, 8, 768, 0, True),
        "Qwen3-Next-80B-A3B": (512, 10, 512, 512, True),
        "Qwen3.5-35B-A3B": (256, 8, 512, 512, True),
        "granite-4.0-h-tiny": (64, 6, 512, 1024, False),
        "Qwen3-VL-30B-A3B": (128, 8, 768, 0, True),
        "Mixtral-8x7B": (8, 2, 14_336, 0, True),
        "OLMoE-1B-7B": (64, 8, 1024, 0, False),
        "granite-3.1-3b-a800m": (40, 8, 512, 0, False),
        "gpt-oss-20b": (32, 4, 2880, 0, False),
        "ERNIE-4.5-21B-A3B": (64, 6, 1536, 3072, True),
        "MiniMax-M2": (256, 8, 1536, 0, True),
        "LFM2-8B-A1B": (32, 4, 1792, 0, True),
        "Kimi-Linear-48B-A3B": (256, 8, 1024, 1024, True),
        "Nemotron-3-Nano-30B-A3B": (128, 6, 1856, 3712, True),
        "GLM-4.7-Flash": (64, 4, 1536, 1536, True),
        "GLM-4.5-Air": (128, 8, 1408, 1408, True),
        "DeepSeek-V2-Lite": (64, 6, 1408, 2816, False),
        "DeepSeek-V2": (160, 6, 1536, 3072, False),
        "DeepSeek-V3": (256, 8, 2048, 2048, True),
        "Kimi-K2": (384, 8, 2048, 2048, True),
        "Llama-4-Scout-17B-16E": (16, 1, 8192, 8192, False),
        "Llama-4-Maverick-17B-128E": (128, 1, 8192, 8192, False),
    }
    glm = found["GLM-4.5-Air"]
    assert glm is not None
    assert (glm.scoring, glm.has_correction_bias) == (Scoring.SIGMOID, True)
    assert layers_where(read(tmp_path, HUB_CONFIGS["GLM-4.5-Air"]), mlp_size=10_944) == [0]
    flash = HUB_CONFIGS["GLM-4.7-Flash"]
    listed = {**flash, "mlp_layer_types": ["sparse"] * 46 + ["dense"]}
    for raw, dense in ((flash, [0]), (listed, [46])):
        assert layers_where(read(tmp_path, raw), mlp_size=10_240) == dense
    ernie = {**HUB_CONFIGS["ERNIE-4.5-21B-A3B"], "num_hidden_layers": 8}
    ranged = {"moe_layer_start_index": 2, "moe_layer_end_index": 5, "moe_layer_interval": 2}
    for raw, dense in ((ernie, [0]), ({**ernie, **ranged}, [0, 1, 2, 4, 6, 7])):
        assert layers_where(read(tmp_path, raw), mlp_size=12_288) == dense


def test_deepseek_routes_experts_by_group(tmp_path: Path) -> None:
    names = ("DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3")
    found = [read(tmp_path, HUB_CONFIGS[name]).moe for name in names]
    moes = [moe for moe in found if moe is not None]

    groups = [(moe.num_groups, moe.top_groups, moe.group_best) for moe in moes]
    assert groups == [(1, 1, 1), (8, 3, 1), (8, 4, 2)]
    assert [moe.scoring for moe in moes] == [Scoring.SOFTMAX, Scoring.SOFTMAX, Scoring.SIGMOID]
    assert [moe.has_correction_bias for moe in moes] == [False, False, True]
    assert [moe.scale for moe in moes] == [1.0, 16.0, 2.5]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("Llama-3.2-1B", 131_072),
        ("gemma-3-4b", 131_072),  # with its factor of 8
        ("Phi-4-mini", 131_072),
        ("Olmo-3-7B", 65_536),
        ("gpt-oss-20b", 131_072),
        ("SmolLM3-3B", 65_536),
        ("Llama-4-Scout-17B-16E", 10_485_760),
    ],
)
def test_the_longest_context_is_that_of_the_model(name: str, length: int, tmp_path: Path) -> None:
    assert read(tmp_path, HUB_CONFIGS[name]).max_context_len() == length


def test_user_configured_yarn_extends_a_model_with_layers_without_rope(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65_536}

    config = read(tmp_path, {**HUB_CONFIGS["SmolLM3-3B"], "rope_scaling": yarn})

    assert config.max_context_len() == 131_072


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'architectures' is .*MambaForCausalLM"):
        read(tmp_path, {**LLAMA, "architectures": ["MambaForCausalLM"]})


REFUSED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "attn_logit_softcapping": (LLAMA, {"attn_logit_softcapping": 30.0}),
    "attention_multiplier": (LLAMA, {"attention_multiplier": 0.1}),
    "logit_scale": (LLAMA, {"logit_scale": 0.0625}),
    "mup_scale": (LLAMA, {"mup_scale": 2.0}),
    "conv_bias": (HUB_CONFIGS["LFM2-1.2B"], {"conv_bias": True}),
    "block_ffn_dim_multiplier": (HUB_CONFIGS["LFM2-1.2B"], {"block_ffn_dim_multiplier": 1e9}),
    "mla_use_nope": (HUB_CONFIGS["Kimi-Linear-48B-A3B"], {"mla_use_nope": False}),
    "n_shared_experts": (NEMOTRON, {"n_shared_experts": 2}),
    "mlp_hidden_act": (NEMOTRON, {"mlp_hidden_act": "silu"}),
    "mamba_norm_before_gate": (
        FALCON_H1,
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "time_step_limit": (NEMOTRON, {"time_step_limit": [0.001, 0.1]}),
    "linear_allow_neg_eigval": (
        HUB_CONFIGS["Qwen3-Next-80B-A3B"],
        {"linear_allow_neg_eigval": True},
    ),
    "clip_qkv": (HUB_CONFIGS["OLMoE-1B-7B"], {"clip_qkv": 8.0}),
    "hidden_act": (LLAMA, {"hidden_act": "relu2"}),
    "num_experts": (LLAMA, {"num_experts": 8}),
    "n_group": (QWEN_MOE, {"n_group": 4}),
    "no_rope_layers": (LLAMA, {"no_rope_layers": [1, 0] * 8}),
    "partial_rotary_factor": (LLAMA, {"partial_rotary_factor": 0.5}),
    "rotary_dim": (LLAMA, {"rotary_dim": 32}),
    "layer_types": (LLAMA, {"layer_types": ["sliding_attention"] * 16}),
    "rope_type": (LLAMA, {"rope_scaling": {"rope_type": "axial"}}),
    "long_mscale": (PHI, {"rope_scaling": {**PHI["rope_scaling"], "long_mscale": 1.2}}),
    "llama_4_scaling_beta": (LLAMA, {"rope_parameters": {"llama_4_scaling_beta": 0.1}}),
    "alpha": (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}),
    "swiglu_limit": (QWEN_MOE, {"swiglu_limit": 7.0}),
    "kv_lora_rank": (LLAMA, {"kv_lora_rank": 512}),
    "index_topk": (DEEPSEEK, {"index_topk": 2048}),
    "attention_bias": (DEEPSEEK, {"attention_bias": True}),
    "scoring_func": (DEEPSEEK, {"scoring_func": "softmax"}),
    "topk_method": (DEEPSEEK, {"topk_method": "greedy"}),
    "norm_topk_prob": (HUB_CONFIGS["DeepSeek-V2"], {"norm_topk_prob": True}),
    "moe_layer_freq": (DEEPSEEK, {"moe_layer_freq": 2}),
    "moe_norm_min": (HUB_CONFIGS["ERNIE-4.5-21B-A3B"], {"moe_norm_min": 0.1}),
    "use_bidirectional_attention": (
        HUB_CONFIGS["gemma-3-1b"],
        {"use_bidirectional_attention": True},
    ),
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_change_the_computation_are_refused_by_name(field: str, tmp_path: Path) -> None:
    raw, changes = REFUSED[field]
    read(tmp_path, raw)

    with pytest.raises(ModelError, match=f"'{field}'"):
        read(tmp_path, {**raw, "rope_scaling": None, **changes})


@pytest.mark.parametrize(
    ("field", "raw", "changes"),
    [
        ("layer_types", HUB_CONFIGS["gpt-oss-20b"], {"num_hidden_layers": 3}),
        ("no_rope_layers", HUB_CONFIGS["SmolLM3-3B"], {"no_rope_layers": [1, 1, 0]}),
        ("short_factor", PHI, {"rope_scaling": {**PHI["rope_scaling"], "short_factor": [1.0]}}),
        ("num_experts_per_tok", QWEN_MOE, {"num_experts_per_tok": 129}),
        ("num_key_value_heads", QWEN_MOE, {"num_key_value_heads": 5}),
        ("num_key_value_heads", DEEPSEEK, {"num_key_value_heads": 64}),
        ("qk_rope_head_dim", DEEPSEEK, {"qk_rope_head_dim": 63}),
        ("hybrid_override_pattern", NEMOTRON, {"hybrid_override_pattern": "M-*--"}),
        ("hybrid_override_pattern", NEMOTRON, {"hybrid_override_pattern": "M-*O"}),
        ("layers_block_type", NEMOTRON, {"layers_block_type": ["mlp", "mamba", "attention"]}),
        ("n_groups", NEMOTRON, {"n_groups": 7}),
        ("ssm_multipliers", FALCON_H1, {"ssm_multipliers": [1.0] * 4}),
        ("mamba_d_head", FALCON_H1, {"mamba_d_ssm": 1530}),
        ("partial_rotary_factor", PHI, {"partial_rotary_factor": 0.01}),
    ],
)
def test_wrong_lengths_and_sizes_are_refused_by_name(
    field: str, raw: Mapping[str, Any], changes: Mapping[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"'{field}'"):
        read(tmp_path, {**raw, **changes})


def test_each_architecture_but_plain_text_ones_has_a_published_example() -> None:
    """Covers that the table of configurations grows with the table of families."""
    named = {raw["architectures"][0] for raw in HUB_CONFIGS.values()}
    text_alone = {
        *("Ministral3ForCausalLM", "MinistralForCausalLM", "Llama4ForCausalLM"),
        *("Gemma3nForCausalLM", "Gemma4ForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    }
    assert FAMILIES.keys() - named == text_alone
