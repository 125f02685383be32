"""Adapters that no node may serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS
from tests.support.adapters import write_adapter


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).fill_(torch.nan)


def with_other_shapes(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        tensors[name] = torch.zeros(4, 4)


def with_huge_rank(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        is_down = "lora_A" in name
        shape = (4096, tensor.shape[1]) if is_down else (tensor.shape[0], 4096)
        tensors[name] = torch.zeros(shape)


def write_bad(
    model_folder: Path,
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    rank: int = 4,
) -> None:
    write_adapter(model_folder, folder, rank=4)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**settings, "r": rank}))
