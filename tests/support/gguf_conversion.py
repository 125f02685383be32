"""GGUF files of families whose tensors llama.cpp's converter changes, as it writes them.

Names come from the tables of llama.cpp's `gguf` package. Each family has the changes of tensors and
the metadata of the converter's class for it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.support.gguf_files import (
    Config,
    find_arch,
    folder_tensors,
    llama3_factors,
    with_stacked_experts,
    write_tokenizer,
)

Named = Iterator[tuple[str, Tensor]]
TILED = (
    ".in_proj_z.weight",
    ".in_proj_a.weight",
    ".in_proj_b.weight",
    ".A_log",
    ".dt_bias",
)
MTP_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
PREDICTOR_NAMES = {
    f"{name}.weight": f"nextn.{name.replace('.', '_')}.weight"
    for name in (
        "eh_proj",
        "enorm",
        "hnorm",
        "embed_tokens",
        "shared_head.norm",
        "shared_head.head",
    )
}
F32_NAMES = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"),
    *("ssm_conv1d.weight", "shortconv.conv.weight"),
    *(f"ssm_conv1d_{part}.weight" for part in "qkv"),
    *("altup_predict_coef.weight", "altup_correct_coef.weight"),
)
F16_NAMES = ("altup_router.weight", "laurel_l.weight", "laurel_r.weight")


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    change: Callable[[Config, str, Tensor], Named]
    write: Callable[[gguf.GGUFWriter, Config], None]


SHARED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def convert(
    folder: Path, path: Path, kind: str = "F32", *, holds: tuple[str, ...] = ("model", "predictor")
) -> Path:
    """Write a folder as one file, its large matrices in `kind`.

    `holds` says whether the file has the model, the layer after it that predicts several tokens, or
    both.
    """
    config = json.loads((folder / "config.json").read_text())
    family = FAMILIES[config["architectures"][0]]
    config |= config.get("text_config", {})
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    config.setdefault("rope_parameters", plain)
    if "layers_block_type" in config:
        config |= {"num_hidden_layers": len(config["layers_block_type"]), "rope_parameters": plain}
    ropes = config["rope_parameters"]
    config |= {"rope_parameters": ropes.get("full_attention", ropes), "stacked": defaultdict(dict)}
    tensors = with_stacked_experts(_with_predictor(config, folder_tensors(folder)))
    first = f"model.layers.{config['num_hidden_layers']}."
    predictor = {name for name in tensors if name.startswith(first)}
    wanted = {"model": tensors.keys() - predictor, "predictor": predictor | {*SHARED}}
    kept = {name for part in holds for name in wanted[part]}
    tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    config["num_nextn_predict_layers"] = int(not predictor.isdisjoint(kept))
    writer = gguf.GGUFWriter(path, family.architecture)
    write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    write_common(writer, config)
    family.write(writer, config)
    stored = dict(_stored_tensors(tensors, family, config, kind))
    for name, (data, data_kind) in sorted(stored.items(), reverse=True):  # any order is allowed
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[data_kind])
    if config["rope_parameters"]["rope_type"] == "llama3":
        factors = llama3_factors(config["rope_parameters"], config["head_dim"])
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored_tensors(
    tensors: Mapping[str, Tensor], family: Family, config: Config, kind: str
) -> Iterator[tuple[str, tuple[np.ndarray, str]]]:
    """Yield the name of each tensor in the file, its data, and their type."""
    num_layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    names = gguf.get_tensor_name_map(find_arch(family.architecture), num_layers)

    def target(name: str) -> str:
        own = PREDICTOR_NAMES.get(re.sub(r"model\.layers\.\d+\.", "", name))
        if own is not None:  # the gguf package knows them of few architectures
            return _in_block(name, own)
        found = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        if found is None:
            raise ValueError(f"gguf has no name for {name}")
        return found

    for hub_name, tensor in tensors.items():
        if hub_name.endswith("_blocks"):
            scales = tensors[hub_name.replace("_blocks", "_scales")]
            for name, rows in _mxfp4(hub_name, tensor, scales):
                yield target(name), (rows, "MXFP4")
        elif not hub_name.endswith("_scales"):
            for name, numbers in family.change(config, hub_name, tensor.float()):
                yield target(name), quantize(target(name), numbers, kind)


def quantize(name: str, tensor: Tensor, kind: str) -> tuple[np.ndarray, str]:
    """Return a tensor in `kind`, or in another one if that is impossible or inexact."""
    numbers = tensor.contiguous().numpy()
    is_small = numbers.ndim < 2 or name.endswith(("_norm.weight", *F32_NAMES))
    if is_small or not name.endswith(".weight"):
        kind = "F32"
    elif kind != "F32" and (numbers.shape[-1] % 32 or name.endswith(F16_NAMES)):
        kind = "F16"
    return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]), kind


def _mxfp4(hub_name: str, blocks: Tensor, scales: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    """Yield matrices of experts. A byte has numbers 2i and 2i + 1 of a group; here i and i + 16."""
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    rows = torch.cat((scales[..., None], halves), dim=-1).flatten(-2).numpy()
    stem, _, part = hub_name.removesuffix("_blocks").rpartition(".")
    if part == "gate_up_proj":
        yield f"{stem}.gate_proj.weight", rows[:, ::2]
        yield f"{stem}.up_proj.weight", rows[:, 1::2]
    else:
        yield f"{stem}.{part}.weight", rows


def write_common(writer: gguf.GGUFWriter, config: Config) -> None:
    """Write what the converter writes for all families."""
    predictors = config["num_nextn_predict_layers"]
    writer.add_block_count(config["num_hidden_layers"] + predictors)
    if predictors:
        writer.add_nextn_predict_layers(predictors)
    fields = (
        ("max_position_embeddings", writer.add_context_length),
        ("hidden_size", writer.add_embedding_length),
        ("intermediate_size", writer.add_feed_forward_length),
        ("num_attention_heads", writer.add_head_count),
        ("num_key_value_heads", writer.add_head_count_kv),
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("head_dim", writer.add_key_length),
        ("head_dim", writer.add_value_length),
        ("vocab_size", writer.add_vocab_size),
    )
    for name, add in fields:
        if config.get(name) is not None and not _is_latent(config, name):
            add(config[name])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


def _is_latent(config: Config, name: str) -> bool:
    """Return whether DeepSeek's class writes this field itself."""
    return "kv_lora_rank" in config and name in ("num_key_value_heads", "head_dim")


def _with_predictor(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which Qwen's layer that predicts several tokens is named as a last one."""
    last = f"model.layers.{config['num_hidden_layers']}."
    renamed = {"mtp.layers.0.": last, **{old: last + new for old, new in MTP_NAMES.items()}}

    def rename(name: str) -> str:
        old = next((old for old in renamed if name.startswith(old)), None)
        return name if old is None else name.replace(old, renamed[old], 1)

    return {rename(name): tensor for name, tensor in tensors.items()}


def _in_block(hub_name: str, name: str) -> str:
    return f"blk.{hub_name.split('.')[2]}.{name}"


def _pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Store the rows of rotated heads in pairs."""
    by_head = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return by_head.swapaxes(1, 2).reshape(tensor.shape)


def _with_pairs(config: Config, name: str, tensor: Tensor) -> Named:
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        tensor = _pairs(tensor, config["num_attention_heads"])
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        tensor = _pairs(tensor, config["num_key_value_heads"])
    yield name, tensor


def _gpt_oss(_config: Config, name: str, tensor: Tensor) -> Named:
    """Gate and up alternate in the hub; its matrices are transposed."""
    stem, _, part = name.rpartition("experts.")
    if "sinks" in name:
        yield f"{name}.weight", tensor
    elif part == "gate_up_proj_bias":
        yield f"{stem}experts.gate_proj.bias", tensor[..., ::2]
        yield f"{stem}experts.up_proj.bias", tensor[..., 1::2]
    elif part == "down_proj_bias":
        yield f"{stem}experts.down_proj.bias", tensor
    elif part == "gate_up_proj":
        tensor = tensor.transpose(-1, -2)
        yield f"{stem}experts.gate_proj.weight", tensor[:, ::2]
        yield f"{stem}experts.up_proj.weight", tensor[:, 1::2]
    elif part == "down_proj":
        yield f"{stem}experts.down_proj.weight", tensor.transpose(-1, -2)
    else:
        yield name, tensor


def _write_gpt_oss(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _deepseek(config: Config, name: str, tensor: Tensor) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield _correction(name), tensor
        return
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    by_head = tensor.view(config["num_attention_heads"], value + nope, tensor.shape[-1])
    keys, values = by_head.split([nope, value], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _correction(name: str) -> str:
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


def _write_deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    _write_routed_experts(writer, config)
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    is_v2 = config["architectures"][0] == "DeepseekV2ForCausalLM"
    functions = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(functions.SOFTMAX if is_v2 else functions.SIGMOID)
    writer.add_rope_dimension_count(rope)
    if "mscale_all_dim" in config["rope_parameters"]:
        mscale = config["rope_parameters"]["mscale_all_dim"]
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _kimi_linear(config: Config, name: str, tensor: Tensor) -> Named:
    """The hub's first MLP has another name than transformers 5 writes."""
    name = re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)
    if name.endswith("conv1d.weight"):
        tensor = tensor.reshape(1, -1, 1, tensor.shape[-1])
    elif name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    yield from _deepseek(config, name, tensor)


def _write_kimi_linear(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv([int(each == "full_attention") for each in config["layer_types"]])
    writer.add_context_length(config["model_max_length"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])


def _write_routed_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])


def _corrected(_: Config, name: str, tensor: Tensor) -> Named:
    yield _correction(name), tensor


def _write_glm4_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    share = config["rope_parameters"].get("partial_rotary_factor", 0.5)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    _write_routed_experts(writer, config)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _write_ernie_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def _write_minimax(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["rotary_dim"])


def _granite_moe(config: Config, name: str, tensor: Tensor) -> Named:
    """Gate and up are one matrix in the hub."""
    has_experts = bool(config["num_local_experts"])
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.split(config["intermediate_size"], dim=-2)
        yield _in_block(name, "ffn_gate_exps.weight"), gate
        yield _in_block(name, "ffn_up_exps.weight"), up
    elif name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.split(config["shared_intermediate_size"], dim=-2)
        suffix = "_shexp" if has_experts else ""
        yield _in_block(name, f"ffn_gate{suffix}.weight"), gate
        yield _in_block(name, f"ffn_up{suffix}.weight"), up
    elif name.endswith("shared_mlp.output_linear.weight") and not has_experts:
        yield _in_block(name, "ffn_down.weight"), tensor
    else:
        yield from _with_pairs(config, name, tensor)


def _write_granite_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _granite_hybrid(config: Config, name: str, tensor: Tensor) -> Named:
    if ".mamba." not in name:
        yield from _granite_moe(config, name, tensor)
        return
    if name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight"):
        tensor = tensor.reshape(config["mamba_n_groups"], -1)
    elif name.endswith(".A_log"):
        tensor = -tensor.exp()[:, None]
    elif name.endswith(".D"):
        tensor = tensor[:, None]
    yield name, tensor


def _write_granite_hybrid(writer: gguf.GGUFWriter, config: Config) -> None:
    _write_granite_moe(writer, config)
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    heads = config["num_key_value_heads"]
    types = config["layer_types"]
    writer.add_head_count_kv(
        [0 if each in ("mamba", "linear_attention") else heads for each in types]
    )
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)


def _falcon_h1(config: Config, name: str, tensor: Tensor) -> Named:
    """Matrices are multiplied; the name of the MLP's norm has no `.weight`."""
    gate, down = config["mlp_multipliers"]
    keys, inputs = config["key_multiplier"], config["attention_in_multiplier"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": inputs,
        "k_proj": keys * inputs,
        "v_proj": inputs,
        "o_proj": config["attention_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
    }
    tensor = tensor * factors.get(name.split(".")[-2], 1.0)
    if name.endswith("in_proj.weight"):
        inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, groups, groups, config["mamba_n_heads"]]
        parts = zip(tensor.split(sizes), config["ssm_multipliers"], strict=True)
        tensor = torch.cat([part * factor for part, factor in parts])
    yield from _granite_hybrid(config, name, tensor) if ".mamba." in name else [(name, tensor)]


def _write_falcon_h1(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _lfm2(_: Config, name: str, tensor: Tensor) -> Named:
    name = name.replace(".expert_bias", ".expert_bias.bias")
    if ".experts." in name:
        name = name.removeprefix("model.")
    yield name, tensor.squeeze(1) if "conv.conv" in name else tensor


def _write_lfm2(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if each == "conv" else heads for each in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    if "block_multiple_of" in config:
        multiple, size = config["block_multiple_of"], int(2 * config["intermediate_size"] / 3)
        writer.add_feed_forward_length(multiple * -(-size // multiple))


def _write_lfm2_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _write_lfm2(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _nemotron_h(config: Config, name: str, tensor: Tensor) -> Named:
    granite = {"mamba_n_groups": config["n_groups"]}
    mamba = name.replace(".mixer.", ".mamba.")
    is_mamba = name.endswith((".dt_bias", "conv1d.weight", "mixer.norm.weight", ".A_log", ".D"))
    if not is_mamba:
        if ".experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        yield _correction(name), tensor
        return
    for changed, numbers in _granite_hybrid(granite, mamba, tensor):
        yield changed.replace(".mamba.", ".mixer."), numbers


def _write_nemotron_h(writer: gguf.GGUFWriter, config: Config) -> None:
    types = config["layers_block_type"]
    sizes = {"mlp": config["intermediate_size"]}
    writer.add_feed_forward_length([sizes.get(each, 0) for each in types])
    heads = {"full_attention": config["num_key_value_heads"]}
    writer.add_head_count_kv([heads.get(each, 0) for each in types])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    if "moe" in types:
        _write_routed_experts(writer, config)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _write_mistral3(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def _mistral3(config: Config, name: str, tensor: Tensor) -> Named:
    name = name.replace("language_model.", "")
    if "multi_modal_projector" not in name and "vision_tower" not in name:
        yield from _with_pairs(config, name, tensor)


def _text_alone(_: Config, name: str, tensor: Tensor) -> Named:
    """Stacked experts are split, as transformers 5 writes them; published ones are transposed."""
    name = name.replace("language_model.", "")
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=-2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    elif "visual." not in name:
        yield name, tensor


def _gemma3n(config: Config, name: str, tensor: Tensor) -> Named:
    """The projections of all streams are stacked: they come with the last one."""
    kind, _, number = name.removesuffix(".weight").rpartition(".")
    if kind in ("model.altup_projections", "model.altup_unembed_projections"):
        stacked = config["stacked"][kind]
        stacked[int(number)] = tensor
        if len(stacked) == config["altup_num_inputs"] - 1:
            yield f"{kind}.weight", torch.stack([stacked[each] for each in sorted(stacked)])
    else:
        yield f"{name}.weight" if name.endswith("_scale") else name, tensor


def _write_gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    types = config["layer_types"]
    writer.add_sliding_window_pattern([each == "sliding_attention" for each in types])


def _write_vision(writer: gguf.GGUFWriter, config: Config) -> None:
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "deepstack_visual_indexes" in config["vision_config"]:
        layers = len(config["vision_config"]["deepstack_visual_indexes"])
        writer.add_num_deepstack_layers(layers)


def _llama4(_: Config, name: str, tensor: Tensor) -> Named:
    if name.endswith("gate_up_proj"):
        gate, up = tensor.transpose(-1, -2).split(tensor.shape[-1] // 2, dim=-2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    else:
        yield name, tensor


def _write_llama4(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _qwen3_next(config: Config, name: str, tensor: Tensor) -> Named:
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("in_proj_qkvz.weight"):
        groups, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
        value = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
        by_group = tensor.unflatten(0, (groups, -1)).split([key, key, value, value], dim=1)
        queries, keys, values, gates = (part.flatten(0, 1) for part in by_group)
        yield _in_block(name, "attn_qkv.weight"), torch.cat([queries, keys, values])
        yield _in_block(name, "attn_gate.weight"), gates
    else:
        yield from _text_alone(config, name, tensor)


def _qwen3_5(config: Config, name: str, tensor: Tensor) -> Named:
    """Value heads are stored in the order of broadcasting: one of each key head, then the next."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * groups * config["linear_key_head_dim"]

    def tiled(values: Tensor, dimension: int = 0) -> Tensor:
        by_head = values.unflatten(dimension, (groups, heads // groups, -1))
        by_round: Tensor = by_head.transpose(dimension, dimension + 1)
        return by_round.flatten(dimension, dimension + 2)

    if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        tensor = torch.cat([tensor[:keys], tiled(tensor[keys:])])
    elif name.endswith(TILED):
        tensor = tiled(tensor)
    elif name.endswith("linear_attn.out_proj.weight"):
        tensor = tiled(tensor, 1)
    yield from _qwen3_next(config, name, tensor)


def _write_qwen3_linear(writer: gguf.GGUFWriter, config: Config) -> None:
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    share = config["rope_parameters"].get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))


FAMILIES: Mapping[str, Family] = {
    "Gemma3nForCausalLM": Family("gemma3n", _gemma3n, _write_gemma3n),
    "GptOssForCausalLM": Family("gpt-oss", _gpt_oss, _write_gpt_oss),
    "DeepseekV2ForCausalLM": Family("deepseek2", _deepseek, _write_deepseek),
    "DeepseekV3ForCausalLM": Family("deepseek2", _deepseek, _write_deepseek),
    "Glm4MoeLiteForCausalLM": Family("deepseek2", _deepseek, _write_deepseek),
    "KimiLinearForCausalLM": Family("kimi-linear", _kimi_linear, _write_kimi_linear),
    "Glm4MoeForCausalLM": Family("glm4moe", _corrected, _write_glm4_moe),
    "Ernie4_5_MoeForCausalLM": Family("ernie4_5-moe", _corrected, _write_ernie_moe),
    "MiniMaxM2ForCausalLM": Family("minimax-m2", _corrected, _write_minimax),
    "GraniteMoeForCausalLM": Family("granitemoe", _granite_moe, _write_granite_moe),
    "GraniteMoeHybridForCausalLM": Family("granitehybrid", _granite_hybrid, _write_granite_hybrid),
    "FalconH1ForCausalLM": Family("falcon-h1", _falcon_h1, _write_falcon_h1),
    "Lfm2ForCausalLM": Family("lfm2", _lfm2, _write_lfm2),
    "Lfm2MoeForCausalLM": Family("lfm2moe", _lfm2, _write_lfm2_moe),
    "NemotronHForCausalLM": Family("nemotron_h_moe", _nemotron_h, _write_nemotron_h),
    "Ministral3ForCausalLM": Family("mistral3", _mistral3, _write_mistral3),
    "Mistral3ForConditionalGeneration": Family("mistral3", _mistral3, _write_mistral3),
    "Qwen3NextForCausalLM": Family("qwen3next", _qwen3_next, _write_qwen3_linear),
    "Qwen3_5ForCausalLM": Family("qwen35", _qwen3_5, _write_qwen3_linear),
    "Qwen3_5MoeForCausalLM": Family("qwen35moe", _qwen3_5, _write_qwen3_linear),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2vl", _text_alone, _write_vision),
    "Qwen3VLForConditionalGeneration": Family("qwen3vl", _text_alone, _write_vision),
    "Qwen3VLMoeForConditionalGeneration": Family("qwen3vlmoe", _text_alone, _write_vision),
    "Llama4ForCausalLM": Family("llama4", _llama4, _write_llama4),
}
