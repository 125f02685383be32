"""EAGLE-3 heads with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TAPS = "eagle_aux_hidden_state_layer_ids"


def make_head_folder(
    folder: Path,
    target: Path,
    fields: Mapping[str, Any] = {},
    *,
    num_drafted: int | None = None,
    seed: int = 3,
) -> Path:
    """Write a head for the model in `target`.

    `num_drafted` tokens can be drafted, every second one of the vocabulary; None: all.
    """
    model = json.loads((target / "config.json").read_text())
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    head_dim = model.get("head_dim") or hidden // model["num_attention_heads"]
    size = 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_key_value_heads"],
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "draft_vocab_size": num_drafted or vocab,
        "dtype": model.get("dtype", "float32"),
        TAPS: [0, 1, 1],
        **fields,
    }
    heads, num_taps = config["num_attention_heads"], len(config[TAPS])
    kv_heads = config["num_key_value_heads"]
    dtype: torch.dtype = getattr(torch, str(config["dtype"]))
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) / math.sqrt(columns)).to(dtype)

    def norm(length: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(length, generator=random)).to(dtype)

    tensors = {
        "fc.weight": matrix(hidden, num_taps * hidden),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
        "midlayer.post_attention_layernorm.weight": norm(hidden),
        "midlayer.self_attn.q_proj.weight": matrix(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": matrix(size, hidden),
        "midlayer.mlp.up_proj.weight": matrix(size, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, size),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(num_drafted or vocab, hidden),
    }
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_taps * hidden)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": norm(hidden) for number in range(num_taps)}
    if num_drafted is not None:
        drafted = torch.arange(num_drafted)
        tensors["d2t"] = drafted.clone()  # token 2 * i, less i
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, 2 * drafted, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
