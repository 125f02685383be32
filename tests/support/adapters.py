"""Random LoRA adapters as PEFT saves them, and base models into which they are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
RECURRENT = ("in_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate", "shared_expert_gate")
ALL = (*ATTENTION, *LATENT, *RECURRENT, *MLP)


def write_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    names: Sequence[str] = ALL,
    seed: int = 0,
    scale: float = 0.2,
    **config: Any,
) -> Path:
    """Write an adapter of the linear layers with these names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in names and weight.dim() == 2:
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}.lora_"
            tensors[f"{prefix}A.weight"] = scale * torch.randn(rank, columns, generator=generator)
            tensors[f"{prefix}B.weight"] = scale * torch.randn(rows, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*names],
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """Write the base model with the adapter's products added to its weights."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    factor = settings["lora_alpha"] / settings["r"] ** (0.5 if settings.get("use_rslora") else 1)
    changes = load_file(adapter / "adapter_model.safetensors")
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in changes:
            product = changes[f"{prefix}B.weight"] @ changes[f"{prefix}A.weight"]
            tensors[name] = (tensors[name].float() + factor * product).to(tensors[name].dtype)
    shutil.copytree(base, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
