"""LoRA adapters of the chat model, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS

# All nodes have them from their start; more than fit into memory.
NAMES = ("red", "green", "blue")
RELOADED = "paint"  # name that means one of the first and the last, or none
MEMORY = ("--max-loras=2", "--max-cpu-loras=2")
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")
TOWER = ".vision_model."
RANK, ALPHA, STD = 4, 8, 0.2  # large enough for answers to differ


def make_adapters(model: str, root: Path) -> tuple[str, ...]:
    """Write the adapters below `root`, and return the options of nodes that serve them."""
    for seed, name in enumerate(NAMES):
        _write_adapter(model, root / name, seed)
    adapters = (f"--lora={name}={root / name}" for name in NAMES)
    return (f"--lora-root={root}", *adapters, *MEMORY)


def _write_adapter(model: str, folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    checkpoint = open_checkpoint(model)
    with checkpoint.open_tensors() as tensors:
        shapes = tensors.shapes()
    num_layers = int(checkpoint.read_config().number("num_hidden_layers", -1))
    without = (TOWER, ".mtp.", f".layers.{num_layers}.")  # parts that take no adapters
    weights = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if any(part in f".{module}" for part in without):
            continue
        if module.rpartition(".")[2] in MODULES and len(shape) == 2:
            prefix = f"base_model.model.{module}.lora_"
            weights[f"{prefix}A.weight"] = STD * torch.randn(RANK, shape[1], generator=generator)
            weights[f"{prefix}B.weight"] = STD * torch.randn(shape[0], RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    sizes = {"r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES}
    (folder / CONFIG).write_text(json.dumps({**config, **sizes}), encoding="utf-8")
