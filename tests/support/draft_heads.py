"""EAGLE heads with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TAPS = "eagle_aux_hidden_state_layer_ids"


def make_head_folder(
    folder: Path,
    target: Path,
    fields: Mapping[str, Any] = {},
    *,
    num_drafted: int | None = None,
    seed: int = 3,
) -> Path:
    """Write an EAGLE-3 head for the model in `target`.

    `num_drafted` tokens can be drafted, every second one of the vocabulary; None: all.
    """
    config = _config_for(target, ["LlamaForCausalLMEagle3"]) | {TAPS: [0, 1, 1], **fields}
    hidden, vocab, num_taps = config["hidden_size"], config["vocab_size"], len(config[TAPS])
    config["draft_vocab_size"] = num_drafted or vocab
    random = _Weights(config, seed)
    tensors = {
        "fc.weight": random.matrix(hidden, num_taps * hidden),
        "midlayer.input_layernorm.weight": random.norm(hidden),
        "midlayer.hidden_norm.weight": random.norm(hidden),
        **random.layer("midlayer.", 2 * hidden),
        "norm.weight": random.norm(hidden),
        "lm_head.weight": random.matrix(num_drafted or vocab, hidden),
    }
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(num_taps * hidden)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": random.norm(hidden) for number in range(num_taps)}
    if num_drafted is not None:
        drafted = torch.arange(num_drafted)
        tensors["d2t"] = drafted.clone()  # token 2 * i, less i
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, 2 * drafted, True)
    return _write(folder, config, tensors)


def make_eagle_folder(folder: Path, target: Path, fields: Mapping[str, Any] = {}) -> Path:
    """Write an EAGLE head as SafeAILab does, with a bias and an embedding that nobody reads."""
    config = _config_for(target, ["LlamaForCausalLM"]) | {"bias": True, **fields}
    hidden, random = config["hidden_size"], _Weights(config, seed=4)
    tensors = {
        "embed_tokens.weight": random.matrix(config["vocab_size"], hidden),
        "fc.weight": random.matrix(hidden, 2 * hidden),
        **random.layer("layers.0.", hidden),
    }
    if config["bias"]:
        tensors["fc.bias"] = random.norm(hidden) - 1
    if config.get("qkv_bias"):
        for name in ("q_proj", "k_proj", "v_proj"):
            name = f"layers.0.self_attn.{name}"
            tensors[f"{name}.bias"] = random.norm(len(tensors[f"{name}.weight"])) - 1
    return _write(folder, config, tensors)


def make_speculators_folder(folder: Path, target: Path, *, has_norms: bool) -> Path:
    """Write an EAGLE head as the `speculators` library does."""
    layer = _config_for(target, [])
    hidden, random = layer["hidden_size"], _Weights(layer, seed=5)
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "transformer_layer_config": layer,
        "layernorms": has_norms,
        "fusion_bias": has_norms,
    }
    tensors = {
        "fusion_fc.weight": random.matrix(hidden, 2 * hidden),
        **random.layer("transformer.", hidden),
    }
    if has_norms:
        norms = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
        tensors |= {f"{name}.weight": random.norm(hidden) for name in norms}
        tensors["fusion_fc.bias"] = random.norm(hidden) - 1
    return _write(folder, config, tensors)


def _config_for(target: Path, architectures: list[str]) -> dict[str, Any]:
    model = json.loads((target / "config.json").read_text())
    hidden = model["hidden_size"]
    return {
        "architectures": architectures,
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_key_value_heads"],
        "head_dim": model.get("head_dim") or hidden // model["num_attention_heads"],
        "num_hidden_layers": 1,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "vocab_size": model["vocab_size"],
        "dtype": model.get("dtype", "float32"),
    }


class _Weights:
    """Random tensors of a head's shapes."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, str(config["dtype"]))
        self._random = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        numbers = torch.randn(rows, columns, generator=self._random) / math.sqrt(columns)
        return numbers.to(self._dtype)

    def norm(self, length: int) -> Tensor:
        return (1 + 0.1 * torch.randn(length, generator=self._random)).to(self._dtype)

    def layer(self, prefix: str, width: int) -> dict[str, Tensor]:
        """Return the tensors of a layer without input norm, whose attention reads `width`."""
        config = self._config
        hidden, size, head_dim = (
            config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
        )
        queries, keys = (
            config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads")
        )
        return {
            f"{prefix}post_attention_layernorm.weight": self.norm(hidden),
            f"{prefix}self_attn.q_proj.weight": self.matrix(queries, width),
            f"{prefix}self_attn.k_proj.weight": self.matrix(keys, width),
            f"{prefix}self_attn.v_proj.weight": self.matrix(keys, width),
            f"{prefix}self_attn.o_proj.weight": self.matrix(hidden, queries),
            f"{prefix}mlp.gate_proj.weight": self.matrix(size, hidden),
            f"{prefix}mlp.up_proj.weight": self.matrix(size, hidden),
            f"{prefix}mlp.down_proj.weight": self.matrix(hidden, size),
        }


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), str(folder / "model.safetensors"))
    return folder
