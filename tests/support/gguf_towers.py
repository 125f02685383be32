"""GGUF files of small models with vision towers: one of the text, and one of the tower."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import save_file
from torch import Tensor

from tests.support.gguf_files import folder_tensors, write_gguf

TEXTS = {
    "SmolVLMForConditionalGeneration": "LlamaForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}
IN_TEXT = ("model.text_model.", "language_model.model.", "language_model.")
KINDS = {"SmolVLMForConditionalGeneration": "idefics3", "Gemma3ForConditionalGeneration": "gemma3"}


def write_gguf_with_tower(folder: Path, target: Path, *, swaps_mlp: bool = False) -> Path:
    """Write a folder as two files, and return that of the text.

    With `swaps_mlp`, matrices of the tower have the names of llama.cpp's early files.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0]
    text = target / "text"
    text.mkdir()
    for file in folder.glob("tokenizer*.json"):
        shutil.copy(file, text)
    own = {**config["text_config"], "architectures": [TEXTS[architecture]]}
    (text / "config.json").write_text(json.dumps(own))
    tensors = folder_tensors(folder)
    save_file(dict(_text_tensors(tensors)), text / "model.safetensors", {"format": "pt"})
    written = write_gguf(text, target / "tiny.gguf")
    shutil.rmtree(text)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(target / "mmproj-tiny-F32.gguf", "clip")
    write_tower_fields(writer, architecture, config, processor)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.MMPROJ, config["vision_config"]["num_hidden_layers"]
    )
    for name, tensor in sorted(tensors.items()):
        if "vision" not in name and "connector" not in name and "projector" not in name:
            continue
        if ".head." in name:
            continue
        # As hub folders have them, unlike those that transformers writes now.
        hub_name = name.replace("_weight", ".weight")
        hub_name = hub_name.replace("vision_tower.", "vision_tower.vision_model.")
        stored = names.get_name(hub_name, (".weight", ".bias"))
        assert stored is not None, name
        if swaps_mlp:
            swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            stored = ".".join(swapped.get(part, part) for part in stored.split("."))
        offset = 1.0 if "soft_emb_norm" in name else 0.0
        writer.add_tensor(stored, (tensor.float() + offset).contiguous().numpy())
    finish(writer)
    return written.path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text_tensors(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    found = []
    for name, tensor in tensors.items():
        prefix = next(filter(name.startswith, IN_TEXT), None)
        if name == "lm_head.weight" or name == "language_model.lm_head.weight":
            found.append(("lm_head.weight", tensor))
        elif prefix is not None:
            found.append((f"model.{name.removeprefix(prefix)}", tensor))
    return found


def write_tower_fields(
    writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], processor: dict[str, Any]
) -> None:
    vision = config["vision_config"]
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(KINDS[architecture])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_use_gelu(True)
    if architecture.startswith("Gemma3"):
        side = vision["image_size"] // vision["patch_size"]
        writer.add_vision_projector_scale_factor(side // int(config["mm_tokens_per_image"] ** 0.5))
    else:
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        edge = processor.get("size", {}).get("longest_edge", vision["image_size"])
        writer.add_vision_preproc_image_size(edge)
