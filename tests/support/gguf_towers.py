"""GGUF files of small models with vision towers: one of the text, and one of the tower."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import save_file
from torch import Tensor

from tests.support.gguf_files import folder_tensors, write_gguf

Config = Mapping[str, Any]
TEXTS = {
    "smolvlm": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4ForCausalLM",
    "qwen2_vl": "Qwen2VLForCausalLM",
    "qwen2_5_vl": "Qwen2VLForCausalLM",
    "qwen3_vl": "Qwen3VLForCausalLM",
}
TYPES = {
    "smolvlm": "idefics3",
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "gemma4_unified": "gemma4uv",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
}
IN_TEXT = (
    "model.text_model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
)
IN_TOWER = ("vision", "connector", "projector", "visual.")
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def write_gguf_with_tower(
    folder: Path, target: Path, *, swaps_mlp: bool = False, kind: str = "F32"
) -> Path:
    """Write a folder as two files, and return that of the text.

    With `swaps_mlp`, matrices of the tower have the names of llama.cpp's early files. They are
    stored in `kind`.
    """
    config = json.loads((folder / "config.json").read_text())
    text = target / "text"
    text.mkdir()
    for file in folder.glob("tokenizer*.json"):
        shutil.copy(file, text)
    own = {**config["text_config"], "architectures": [TEXTS[config["model_type"]]]}
    if "deepstack_visual_indexes" in config["vision_config"]:
        own["num_deepstack_layers"] = len(config["vision_config"]["deepstack_visual_indexes"])
    (text / "config.json").write_text(json.dumps(own))
    tensors = folder_tensors(folder)
    save_file(dict(_text_tensors(tensors)), text / "model.safetensors", {"format": "pt"})
    written = write_gguf(text, target / "tiny.gguf")
    shutil.rmtree(text)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(target / f"mmproj-tiny-{kind}.gguf", "clip")
    write_tower_fields(writer, config, processor)
    for name, tensor in _tower_tensors(config, tensors):
        parts = name.split(".")
        stored = ".".join(SWAPPED.get(part, part) for part in parts) if swaps_mlp else name
        _add_tensor(writer, stored, tensor, kind)
    finish(writer)
    return written.path


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """Add a tensor in `kind` where llama.cpp's converter does, and else in float32."""
    numbers = tensor.float().contiguous().numpy()
    if tensor.ndim < 2 or "position" in name:
        return writer.add_tensor(name, numbers)
    is_whole = tensor.ndim == 2 and tensor.shape[1] % 32 == 0  # convolutions have 16 bits
    stored_as = gguf.GGMLQuantizationType[kind if is_whole or kind == "F32" else "F16"]
    quantized = gguf.quants.quantize(numbers, stored_as)
    return writer.add_tensor(name, quantized, raw_dtype=stored_as)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight"):
            yield "lm_head.weight", tensor
        elif not any(part in name for part in IN_TOWER):
            prefix = next(filter(name.startswith, IN_TEXT))
            yield f"model.{name.removeprefix(prefix)}", tensor


def _tower_tensors(config: Config, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as llama.cpp's converter writes them."""
    vision = config["vision_config"]
    if config["model_type"] == "gemma4_unified":
        yield from _gemma4_unified_tensors(tensors)
        return
    num_layers = vision.get("num_hidden_layers") or vision["depth"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_layers)
    if config["model_type"] == "gemma4":
        yield from _gemma4_tensors(names, tensors)
        return
    for name, tensor in sorted(tensors.items()):
        if not any(part in name for part in IN_TOWER) or ".head." in name:
            continue
        # As hub folders have them, unlike those that transformers writes now.
        hub_name, offset = name.replace("_weight", ".weight"), float("soft_emb_norm" in name)
        hub_name = hub_name.replace("vision_tower.", "vision_tower.vision_model.")
        hub_name = hub_name.removeprefix("model.") if ".visual." in hub_name else hub_name
        if ".qkv." in name and config["model_type"] != "qwen3_vl":
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield _stored(names, hub_name.replace("qkv", part)), rows
        elif tensor.ndim == 5:  # of two frames
            yield f"{_stored(names, hub_name)}", tensor[:, :, 0]
            yield f"{_stored(names, hub_name)}.1", tensor[:, :, 1]
        else:
            yield _qwen3_name(vision, hub_name) or _stored(names, hub_name), tensor + offset


def _gemma4_tensors(
    names: gguf.TensorNameMap, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    ends = (".weight", *(f".{way}_{end}" for way in ("input", "output") for end in ("min", "max")))
    for name, tensor in sorted(tensors.items()):
        if not any(part in name for part in IN_TOWER):
            continue
        hub_name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
        hub_name = hub_name.replace(".linear.weight", ".weight")
        if name.endswith("position_embedding_table"):
            hub_name += ".weight"
        stored = tensor[None] if tensor.ndim == 0 else tensor
        if name.endswith("input_proj.weight"):
            side = int((tensor.shape[1] // 3) ** 0.5)
            stored = tensor.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
        found = names.get_name(hub_name, ends)
        assert found is not None, hub_name
        yield str(found), stored
    yield "a.blk.0.attn_q.weight", next(iter(tensors.values()))  # of an audio encoder


def _gemma4_unified_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    stems = {
        "vision_embedder.patch_dense": "v.patch_embd",
        "vision_embedder.patch_ln1": "v.patch_norm.1",
        "vision_embedder.patch_ln2": "v.patch_norm.2",
        "vision_embedder.pos_norm": "v.patch_norm.3",
        "embed_vision.embedding_projection": "mm.input_projection",
    }
    for name, tensor in sorted(tensors.items()):
        stem, _, end = name.removeprefix("model.").rpartition(".")
        if name.endswith("pos_embedding"):
            yield "v.position_embd.weight", tensor.permute(1, 0, 2)
        elif stem in stems:
            is_by_pixel = name.endswith("patch_dense.weight") or ".patch_ln1." in name
            # Colours after each other, not pixels.
            colours = tensor.unflatten(-1, (-1, 3)).transpose(-1, -2).flatten(-2)
            yield f"{stems[stem]}.{end}", colours if is_by_pixel else tensor
    yield "mm.a.input_projection.weight", next(iter(tensors.values()))  # of an audio encoder


def _qwen3_name(vision: Config, name: str) -> str:
    """Return the name of a tensor for which the converter does not use the table."""
    level = re.fullmatch(r"visual\.deepstack_merger_list\.(\d)\.(?:linear_)?(\w+)\.(\w+)", name)
    if level is not None:
        return (
            f"v.deepstack.{vision['deepstack_visual_indexes'][int(level[1])]}.{level[2]}.{level[3]}"
        )
    linear = re.fullmatch(r"visual\.merger\.linear_fc([12])\.(\w+)", name)
    if linear is not None:
        return f"mm.{2 * int(linear[1]) - 2}.{linear[2]}"
    return name.replace("visual.merger.norm", "v.post_ln") if ".merger.norm" in name else ""


def _stored(names: gguf.TensorNameMap, hub_name: str) -> str:
    found = names.get_name(hub_name, (".weight", ".bias"))
    assert found is not None, hub_name
    return str(found)


def write_tower_fields(writer: gguf.GGUFWriter, config: Config, processor: Config) -> None:
    vision, kind = config["vision_config"], config["model_type"]
    writer.add_clip_has_vision_encoder(True)
    if kind.startswith("gemma4"):  # whose file can have an audio encoder, too
        writer.add_clip_vision_projector_type(TYPES[kind])
    else:
        writer.add_clip_projector_type(TYPES[kind])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    is_normalized = processor.get("do_normalize", True)
    writer.add_vision_image_mean(processor["image_mean"] if is_normalized else [0.0] * 3)
    writer.add_vision_image_std(processor["image_std"] if is_normalized else [1.0] * 3)
    writer.add_vision_attention_layernorm_eps(vision.get("layer_norm_eps", 1e-6))
    _write_sizes(writer, vision)
    if kind.startswith("qwen"):
        _write_qwen_fields(writer, kind, vision, processor)
        return
    if kind.startswith("gemma4"):
        writer.add_vision_image_size(224)
        writer.add_vision_projector_scale_factor(vision["pooling_kernel_size"])
        return
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_use_gelu(True)
    if kind == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        scale = side // int(config["mm_tokens_per_image"] ** 0.5)
        writer.add_vision_projector_scale_factor(scale)
        return
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    edge = processor.get("size", {}).get("longest_edge", vision["image_size"])
    writer.add_vision_preproc_image_size(edge)


def _write_sizes(writer: gguf.GGUFWriter, vision: Config) -> None:
    if "mm_embed_dim" in vision:  # without layers
        writer.add_vision_block_count(0)
        writer.add_vision_head_count(0)
        writer.add_vision_feed_forward_length(0)
        writer.add_vision_embedding_length(vision["mm_embed_dim"])
        return
    writer.add_vision_block_count(vision.get("num_hidden_layers") or vision["depth"])
    writer.add_vision_head_count(vision.get("num_attention_heads") or vision["num_heads"])
    writer.add_vision_embedding_length(vision.get("embed_dim") or vision["hidden_size"])
    # The converter takes this field, although it is not the size of Qwen2-VL's MLP.
    writer.add_vision_feed_forward_length(vision.get("intermediate_size", vision["hidden_size"]))


def _write_qwen_fields(
    writer: gguf.GGUFWriter, kind: str, vision: Config, processor: Config
) -> None:
    writer.add_vision_image_size(560)
    if "min_pixels" in processor:
        writer.add_vision_min_pixels(processor["min_pixels"])
        writer.add_vision_max_pixels(processor["max_pixels"])
    if kind == "qwen3_vl":
        writer.add_vision_use_gelu(True)
        listed = vision["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([i in listed for i in range(vision["depth"])])
    if kind == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32(gguf.Keys.ClipVision.WINDOW_SIZE, vision["window_size"])
