"""Adapters that PEFT saves, with random weights, and the models into which it merges them."""

from __future__ import annotations

import shutil
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.models import import_transformers

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class PeftAdapter(NamedTuple):
    folder: Path
    merged: Path


def save_adapter(base: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a random adapter with the settings of a `LoraConfig`."""
    with warnings.catch_warnings(action="ignore"):  # of the use of transformers, and of settings
        _adapted_model(base, seed, config).save_pretrained(folder)
    return folder


def save_and_merge(base: Path, folder: Path, *, seed: int = 0, **config: Any) -> PeftAdapter:
    """Save a random adapter, and the base model merged with it."""
    adapter = PeftAdapter(folder / "adapter", folder / "merged")
    with warnings.catch_warnings(action="ignore"):
        model = _adapted_model(base, seed, config)
        model.save_pretrained(adapter.folder)
        model.merge_and_unload().save_pretrained(adapter.merged)
    for name in TOKENIZER:
        shutil.copy(base / name, adapter.merged / name)
    return adapter


def _adapted_model(base: Path, seed: int, config: dict[str, Any]) -> Any:
    transformers, peft = import_transformers(), import_module("peft")
    has_images = hasattr(transformers.AutoConfig.from_pretrained(base), "vision_config")
    kind = "AutoModelForImageTextToText" if has_images else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted
