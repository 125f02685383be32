"""GGUF files of small model folders, written with llama.cpp's own `gguf` package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Config = Mapping[str, Any]
# Architecture in GGUF, by that of config.json.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Exaone4ForCausalLM": "exaone4",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "SeedOssForCausalLM": "seed_oss",
    "GlmForCausalLM": "chatglm",
    "Glm4ForCausalLM": "glm4",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen2VLForCausalLM": "qwen2vl",  # the text models within
    "Qwen3VLForCausalLM": "qwen3vl",
}
PAIRED = ("llama", "granite", "smollm3")  # llama.cpp stores the rows of rotated heads in pairs
JOINED = ("chatglm",)  # llama.cpp stores queries, keys and values as one
OFFSET_NORMS = ("gemma2", "gemma3")
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Written:
    """A file, and its tensors as it stores them: under names of the hub, dequantized."""

    path: Path
    tensors: Mapping[str, Tensor]


def write_gguf(folder: Path, path: Path, kind: str = "F32", *, tokenizer: str = "gpt2") -> Written:
    """Write a folder as one file, its matrices in `kind`, its tokenizer as bytes or pieces."""
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, name)
    _write_config(writer, name, config)
    _write_any_tokenizer(writer, folder, tokenizer, config["vocab_size"])
    stored: dict[str, Tensor] = {}
    names = gguf.get_tensor_name_map(find_arch(name), config["num_hidden_layers"])
    for hub_name, tensor in sorted(_as_joined(name, folder_tensors(folder)).items()):
        target = names.get_name(_as_named(hub_name), (".weight", ".bias"))
        if target is None and name == "gemma4":
            target = _gemma4_scale(hub_name)
        if target is None:
            raise ValueError(f"gguf has no name for {hub_name}")
        numbers = _as_stored(name, config, hub_name, tensor.float()).numpy()
        if hub_name.endswith("shared_expert_gate.weight"):
            numbers = numbers[0]
        stored_as = _kind(kind if numbers.shape[-1] % 32 == 0 else "F16")
        if numbers.ndim < 2:
            writer.add_tensor(target, numbers)
            back = numbers
        else:
            quantized = gguf.quants.quantize(numbers, stored_as)
            writer.add_tensor(target, quantized, raw_dtype=stored_as)
            back = gguf.quants.dequantize(quantized, stored_as)
        read_back = _as_stored(name, config, hub_name, torch.tensor(back), reverse=True)
        stored |= _as_separate(name, config, hub_name, read_back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, stored)


def _as_named(hub_name: str) -> str:
    """Return the name that `gguf` knows."""
    lacks_weight = hub_name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj"))
    return f"{hub_name}.weight" if lacks_weight else hub_name


def _gemma4_scale(hub_name: str) -> str | None:
    """Return the name of a scale of experts, as llama.cpp's converter has it."""
    layer = hub_name.split(".")[2]
    scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    found = [stem for ending, stem in scales.items() if hub_name.endswith(ending)]
    return f"blk.{layer}.{found[0]}.scale" if found else None


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def with_stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices of all experts of a layer as one, as llama.cpp stores them."""
    experts: dict[str, list[Tensor]] = {}
    for name in filter(EXPERT.search, sorted(tensors, key=lambda each: (len(each), each))):
        experts.setdefault(EXPERT.sub(".experts.", name), []).append(tensors[name])
    others = {name: tensors[name] for name in tensors if not EXPERT.search(name)}
    return {**others, **{name: torch.stack(parts) for name, parts in experts.items()}}


def _as_joined(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = with_stacked_experts(tensors)
    return with_joined_heads(joined) if name in JOINED else joined


def _as_separate(name: str, config: Config, hub_name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name in JOINED and ".qkv_proj." in hub_name:
        return _by_projection(config, hub_name, tensor)
    return {hub_name: tensor} if name == "gemma4" else _by_expert(hub_name, tensor)


def with_joined_heads(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return queries, keys and values of a layer as one tensor."""
    joined = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            parts = [joined.pop(name.replace(".q_proj.", f".{each}_proj.")) for each in "qkv"]
            joined[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return joined


def _by_projection(config: Config, name: str, tensor: Tensor) -> dict[str, Tensor]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head_dim
    sizes = [config["num_attention_heads"] * head_dim, keys, keys]
    return {
        name.replace(".qkv_proj.", f".{each}_proj."): part.contiguous()
        for each, part in zip("qkv", tensor.split(sizes), strict=True)
    }


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if ".experts." not in name:
        is_row = name.endswith("shared_expert_gate.weight")
        return {name: tensor[None] if is_row else tensor}
    return {
        name.replace(".experts.", f".experts.{expert}."): part for expert, part in enumerate(tensor)
    }


def _as_stored(
    name: str, config: Config, hub_name: str, tensor: Tensor, *, reverse: bool = False
) -> Tensor:
    """Return a tensor as llama.cpp stores it, or the reverse."""
    if name in OFFSET_NORMS and hub_name.endswith("norm.weight"):
        return tensor - 1 if reverse else tensor + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if name in PAIRED and f"{part}." in hub_name:
            shape = (config[count], -1, 2) if reverse else (config[count], 2, -1)
            by_head = tensor.unflatten(0, shape)
            joined: Tensor = by_head.transpose(1, 2).flatten(0, 2).contiguous()
            return joined
    return tensor


def _write_config(writer: gguf.GGUFWriter, name: str, config: Config) -> None:
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    if name == "gemma4":
        _write_gemma4(writer, config)
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if name == "gemma4":
        writer.add_key_length_swa(head_dim)
        writer.add_value_length_swa(head_dim)
        head_dim = next(each["head_dim"] for each in config["per_layer_config"].values())
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    _write_rope(writer, config, head_dim)
    for field, add in _optional(writer):
        if config.get(field) is not None:
            add(config[field])


def _write_gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    """Write what llama.cpp has by layer."""
    types, num_layers = config["layer_types"], config["num_hidden_layers"]
    is_full = [kind == "full_attention" for kind in types]
    full = next(iter(config["per_layer_config"].values()))
    heads = config["num_key_value_heads"], full.get("num_key_value_heads")
    writer.add_head_count_kv([heads[each] or heads[0] for each in is_full])
    num_shared, size = config["num_kv_shared_layers"], config["intermediate_size"]
    writer.add_shared_kv_layers(num_shared)
    wide = size * (2 if config["use_double_wide_mlp"] else 1)
    writer.add_feed_forward_length([size] * (num_layers - num_shared) + [wide] * num_shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    if config.get("enable_moe_block"):
        writer.add_expert_used_count(config["top_k_experts"])
    ropes = config["rope_parameters"]
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    num_pairs = full["head_dim"] // 2
    rotated = int(num_pairs * ropes["full_attention"]["partial_rotary_factor"])
    divisors = np.array([1.0] * rotated + [1e30] * (num_pairs - rotated), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _write_rope(writer: gguf.GGUFWriter, config: Config, head_dim: int) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    stretch = rope.get("alpha", 1) ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    if rope["rope_type"] == "proportional":  # the others have the frequency zero
        share = 1
    writer.add_rope_dimension_count(int(head_dim * share))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))


def llama3_factors(rope: Config, head_dim: int) -> np.ndarray:
    """Return the divisors of the frequencies, as llama.cpp's converter writes them."""
    places = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** places
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    length = rope["original_max_position_embeddings"]
    smooth = (length / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(wavelengths > length / low, torch.tensor(factor), between)
    return torch.where(wavelengths < length / high, torch.tensor(1.0), factors).numpy()


def _optional(writer: gguf.GGUFWriter) -> Iterator[tuple[str, Callable[[Any], None]]]:
    yield "sliding_window", writer.add_sliding_window
    yield (
        "layer_types",
        lambda types: writer.add_sliding_window_pattern(
            [each == "sliding_attention" for each in types]
        ),
    )
    yield "rms_norm_eps", writer.add_layer_norm_rms_eps
    yield "layer_norm_eps", writer.add_layer_norm_eps
    yield "attn_logit_softcapping", writer.add_attn_logit_softcapping
    yield "final_logit_softcapping", writer.add_final_logit_softcapping
    yield "num_deepstack_layers", writer.add_num_deepstack_layers
    yield "num_experts", writer.add_expert_count
    yield "num_local_experts", writer.add_expert_count
    yield "moe_intermediate_size", writer.add_expert_feed_forward_length
    yield "shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length
    yield "attention_multiplier", writer.add_attention_scale
    yield "embedding_multiplier", writer.add_embedding_scale
    yield "residual_multiplier", writer.add_residual_scale
    yield "logits_scaling", writer.add_logit_scale
    yield "logit_scale", writer.add_logit_scale
    yield "num_experts_per_tok", writer.add_expert_used_count


def _write_any_tokenizer(writer: gguf.GGUFWriter, folder: Path, kind: str, vocab_size: int) -> None:
    if kind == "gpt2":
        write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    else:
        write_pieces(writer, [f"▁{number}" for number in range(vocab_size - 260)])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Config) -> None:
    """Write a byte-level BPE."""
    vocabulary = tokenizer["model"]["vocab"]
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    by_id = {token_id: token for token, token_id in vocabulary.items()} | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id[token_id] for token_id in sorted(by_id)])
    writer.add_token_types([CONTROL if i in added else NORMAL for i in sorted(by_id)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def write_pieces(
    writer: gguf.GGUFWriter,
    pieces: Sequence[str],
    user_defined: Sequence[str] = (),
    *,
    add_space_prefix: bool = True,
    merges: Sequence[str] = (),
) -> None:
    """Write a SentencePiece vocabulary: special tokens, all bytes, pieces, user-defined tokens.

    With `merges` it is one of Gemma 4.
    """
    kinds = {
        **dict.fromkeys(["<unk>", "<s>", "</s>"], CONTROL),
        **{f"<0x{byte:02X}>": BYTE for byte in range(256)},
        **dict.fromkeys(["▁", *pieces], NORMAL),
        **dict.fromkeys(user_defined, USER_DEFINED),
    }
    writer.add_tokenizer_model("gemma4" if merges else "llama")
    if merges:
        writer.add_token_merges(merges)
    writer.add_token_list(list(kinds))
    writer.add_token_scores([-float(max(0, place - 258)) for place in range(len(kinds))])
    writer.add_token_types([*kinds.values()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(add_space_prefix)


def find_arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _kind(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]
