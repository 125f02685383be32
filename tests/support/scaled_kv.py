"""Model folders with scales for FP8 keys and values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import VARIANTS, Variant, make_model_folder


def grown_folder(
    folder: Path,
    growth: Tensor,
    scales: Mapping[str, Tensor],
    variant: Variant = VARIANTS["llama"],
) -> Path:
    """Make a model whose keys and values grow by KV head, and whose other weights undo that.

    `scales` become tensors of the attention of each layer. The variant is like a Llama.
    """
    make_model_folder(folder, variant)
    config = json.loads((folder / "config.json").read_text())
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    by_kv_row = growth.repeat_interleave(config["head_dim"])
    group_size = config["num_attention_heads"] // config["num_key_value_heads"]
    by_row = growth.repeat_interleave(group_size * config["head_dim"])
    for name in list(tensors):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] *= by_kv_row[:, None]
        if name.endswith("q_proj.weight"):
            tensors[name] /= by_row[:, None]
        if name.endswith("o_proj.weight"):
            tensors[name] /= by_row
            prefix = name.removesuffix("o_proj.weight")
            tensors |= {f"{prefix}{scale}": scales[scale].clone() for scale in scales}
    save_file(tensors, path, {"format": "pt"})
    return folder
