"""Values in config.json that no model can have: refused by the name of their field."""

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
from baton.engine.runner.model.config import ModelConfig
from tests.support.hub_configs import HUB_CONFIGS

LLAMA, GEMMA = HUB_CONFIGS["Llama-3.2-1B"], HUB_CONFIGS["gemma-3-4b"]
QWEN_MOE, PHI = HUB_CONFIGS["Qwen3-30B-A3B"], HUB_CONFIGS["Phi-4-mini"]
GLM, YARN = HUB_CONFIGS["GLM-4.5-Air"], HUB_CONFIGS["Olmo-3-7B"]["rope_scaling"]

GRANITE = HUB_CONFIGS["granite-4.0-h-tiny"]
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    **HUB_CONFIGS["gemma-4-E4B"]["text_config"],
}

GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    **HUB_CONFIGS["gemma-3n-E2B"]["text_config"],
}

SHARED_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def read(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return read_model_config(SafetensorsFolder(folder))


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, "'architectures' is .*must name one of"),
        (LLAMA, {"hidden_size": math.inf}, "'hidden_size' is inf; it must be a number"),
        (LLAMA, {"rms_norm_eps": math.nan}, "'rms_norm_eps' is nan; it must be a number"),
        (LLAMA, {"rms_norm_eps": -1e-5}, "'rms_norm_eps'.*above 0"),
        (LLAMA, {"vocab_size": 10**400}, "'vocab_size' is .*must be a number"),
        (LLAMA, {"max_position_embeddings": 10**30}, "'max_position_embeddings'.*at most"),
        (LLAMA, {"num_hidden_layers": 10**9}, "'num_hidden_layers'.*at most"),
        (LLAMA, {"head_dim": 65}, "'head_dim' is 65; it must be even"),
        (LLAMA, {"head_dim": None, "num_attention_heads": 4096}, "'num_attention_heads'.*2048"),
        (LLAMA, {"rope_theta": 0}, "'rope_theta'.*above 1"),
        (LLAMA, {"rope_scaling": {"factor": 8.0}}, "'rope_type' is missing.*'factor'"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'factor'.*above 0"),
        (
            LLAMA,
            {"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 0}},
            "'low_freq_factor'.*above 0",
        ),
        (LLAMA, {"rope_scaling": {**YARN, "beta_fast": -1}}, "'beta_fast'.*above 0"),
        (LLAMA, {"rope_scaling": {**YARN, "attention_factor": 0}}, "'attention_factor'.*above 0"),
        (PHI, {"original_max_position_embeddings": 1}, "'original_max_pos.*above 1"),
        (PHI, {"partial_rotary_factor": math.inf}, "'partial_rotary_factor' is inf.*a number"),
        (HUB_CONFIGS["gemma-2-27b"], {"query_pre_attn_scalar": 0}, "'query_pre_attn_sc.*above 0"),
        (HUB_CONFIGS["gemma-3-1b"], {"text_config": {}}, "'text_config' is {}; it must be null"),
        (QWEN_MOE, {"num_experts": None}, "'num_experts' is missing"),
        (GLM, {"n_routed_experts": None}, "'n_routed_experts' is missing"),
        (QWEN_MOE, {"num_experts": 2**31 - 1}, "'num_experts' is 2147483647.*at most 2730 in each"),
        (GLM, {"n_routed_experts": 2**20}, "'n_routed_experts' is 1048576; it must be at most"),
        (LLAMA, {"layer_types": [[]] * 16}, "'layer_types' is .*must list 16 of"),
        (LLAMA, {"rope_scaling": {**YARN, "mscale_all_dim": 1e300}}, "'mscale_all_dim'.*at most"),
        (GLM, {"n_group": 3}, "'n_group' is 3; it must divide the 128 experts"),
        (GLM, {"n_group": 128, "topk_group": 8}, "'n_group' is 128.*groups of at least 2"),
        (GLM, {"n_group": 8, "topk_group": 9}, r"'topk_group' is 9.*at most n_group \(8\)"),
        (GLM, {"n_group": 32, "topk_group": 1}, "'num_experts_per_tok' is 8.*at most 4"),
        (GLM, {"first_k_dense_replace": math.inf}, "'first_k_dense_replace' is inf.*a number"),
        (LLAMA, {"mamba_d_state": 128}, "'mamba_d_state' is 128.*changes the computation"),
        (GRANITE, {"mamba_proj_bias": True}, "'mamba_proj_bias' is True.*changes the computation"),
        (GRANITE, {"mamba_conv_bias": False}, "'mamba_conv_bias' is False; it must be true"),
        (GRANITE, {"mamba_d_conv": 1}, "'mamba_d_conv' is 1.*at least 2"),
        (GRANITE, {"mamba_d_head": 32}, "'mamba_d_head' is 32.*3072 with 48 heads"),
        (GRANITE, {"mamba_n_groups": 5}, r"'mamba_n_groups' is 5.*mamba_n_heads \(48\)"),
        (GRANITE, {"time_step_limit": [0.001, 0.1]}, "'time_step_limit'.*changes the computation"),
        (GRANITE, {"layer_types": None}, "'layer_types' is missing; it must list 40 of"),
        (GRANITE, {"layer_types": ["mamba"] * 40}, "'layer_types'.*at least one layer with full"),
        (GRANITE, {"position_embedding_type": "alibi"}, "'position_embedding_type'.*'nope'"),
        (
            LLAMA,
            {"activation_sparsity_pattern": [0.9]},
            "'activation_spar.*changes the computation",
        ),
        (GEMMA3N, {"activation_sparsity_pattern": [0.9]}, "'activation_spars.*each of 30 layers"),
        (GEMMA3N, {"activation_sparsity_pattern": [1.0] * 30}, "'activation_sparsity_.*below 1"),
        (GEMMA3N, {"intermediate_size": [8192] * 29}, "'intermediate_size' is.*each of 30 layers"),
        (GEMMA3N, {"intermediate_size": [0.5] * 30}, "'intermediate_size' is.*whole numbers"),
        (GEMMA3N, {"intermediate_size": []}, "'intermediate_size' is \\[\\].*whole numbers"),
        (GEMMA3N, {"num_hidden_layers": 10**9}, "'num_hidden_layers'.*at most"),
        (GEMMA3N, {"altup_num_inputs": 1}, "'altup_num_inputs' is 1; it must be from 2 to 64"),
        (GEMMA3N, {"altup_active_idx": 4}, "'altup_active_idx' is 4.*one of 4 inputs"),
        (GEMMA3N, {"laurel_rank": 0}, "'laurel_rank' is 0.*above 0"),
        (GEMMA3N, {"hidden_size_per_layer_input": 0}, "'hidden_size_per_layer_input' is 0.*above"),
        (GEMMA3N, {"num_kv_shared_layers": 27}, "'num_kv_shared_layers' is 27.*a layer of each"),
        (GEMMA4, {"num_kv_shared_layers": 42}, "'num_kv_shared_layers' is 42.*a layer of each"),
        (GEMMA4, {"num_kv_shared_layers": 38}, "'num_kv_shared_layers' is 38.*a layer of each"),
        (GEMMA4, {"num_kv_shared_layers": -1}, "'num_kv_shared_layers' is -1.*a layer of each"),
        (GEMMA4, {"num_kv_shared_layers": 1.5}, "'num_kv_shared_layers' is 1.5.*a layer of each"),
        (GEMMA4, {"global_head_dim": 513}, "'head_dim'.*even in all layers"),
        (GEMMA4, {"per_layer_config": {"42": {"head_dim": 512}}}, "'42' is .*one of 42 layers"),
        (GEMMA4, {"per_layer_config": {"x": {}}}, "'x' is .*one of 42 layers"),
        (GEMMA4, {"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "'num_key_value_heads'"),
        (
            GEMMA4,
            {"vocab_size_per_layer_input": 99},
            "'vocab_size_per_layer_input' is 99.*at least",
        ),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        (GEMMA4, {"enable_moe_block": True}, "'top_k_experts' is missing"),
        (
            GEMMA4,
            {"rope_parameters": {**ROPES, "full_attention": {**SHARED_ROPE, "factor": 0}}},
            "'factor'.*above 0",
        ),
        (
            GEMMA4,
            {
                "rope_parameters": {
                    **ROPES,
                    "full_attention": {**SHARED_ROPE, "partial_rotary_factor": 2},
                }
            },
            "'partial_rotary_factor' is 2.*at most 1",
        ),
    ],
)
def test_invalid_values_are_refused_by_name(
    raw: Mapping[str, Any], changes: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    read(tmp_path, raw)

    with pytest.raises(ModelError, match=named):
        read(tmp_path, {**raw, **changes})


def test_a_model_without_recurrent_layers_has_no_state(tmp_path: Path) -> None:
    assert read(tmp_path, GRANITE).recurrent is not None

    assert read(tmp_path, {**GRANITE, "layer_types": ["attention"] * 40}).recurrent is None


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refusal:
        read(tmp_path, {**LLAMA, "text_config": {str(number): number for number in range(1000)}})

    assert len(str(refusal.value)) < 500 + len(str(tmp_path))


def test_the_quantization_can_be_inside_the_text_config(tmp_path: Path) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    text = {**GEMMA["text_config"], "quantization_config": quantization}

    config = read(tmp_path, {**GEMMA, "text_config": text})

    assert (
        config.quantization
        == read(tmp_path, {**GEMMA, "quantization_config": quantization}).quantization
    )
    assert config.quantization is not None
