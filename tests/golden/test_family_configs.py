"""Configurations of published models: read like those that transformers writes for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.config import ModelConfig
from tests.support.hub_configs import HUB_CONFIGS

# transformers fails on the old name of longrope, and knows Kimi K2 only as DeepSeek V3.
UNREADABLE = ("Phi-3-mini-128k", "Kimi-K2")
READABLE = {name: raw for name, raw in HUB_CONFIGS.items() if name not in UNREADABLE}
NESTED = [name for name, raw in HUB_CONFIGS.items() if "text_config" in raw]
# Without them, others of their sizes are wrong.
NEEDED = {
    "gemma-3-27b": ("num_attention_heads",),
    "gemma-3n-E2B": ("num_hidden_layers",),
    "gemma-4-E4B": ("num_hidden_layers",),
    "gemma-4-12B": ("num_hidden_layers",),
    "SmolVLM-256M": ("num_attention_heads", "hidden_size"),
}


def read(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return read_model_config(SafetensorsFolder(folder))


def rewritten(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """Read the configuration after transformers has completed it."""
    fields = copy.deepcopy(dict(raw))
    AutoConfig.for_model(fields.pop("model_type"), **fields).save_pretrained(folder)
    return read_model_config(SafetensorsFolder(folder))


def without_one_field(name: str) -> Iterator[Mapping[str, Any]]:
    raw = HUB_CONFIGS[name]
    for field in raw["text_config"].keys() - {"model_type", *NEEDED.get(name, ())}:
        text = {key: value for key, value in raw["text_config"].items() if key != field}
        yield {**raw, "text_config": text}


@pytest.mark.parametrize("name", READABLE)
def test_a_published_configuration_equals_the_one_that_transformers_writes(
    name: str, tmp_path: Path
) -> None:
    raw = READABLE[name]

    assert read(tmp_path, raw) == rewritten(tmp_path, raw)


@pytest.mark.parametrize("name", NESTED)
def test_fields_missing_in_a_text_config_have_the_defaults_of_transformers(
    name: str, tmp_path: Path
) -> None:
    for raw in without_one_field(name):
        assert read(tmp_path, raw) == rewritten(tmp_path, raw)
