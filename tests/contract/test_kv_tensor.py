"""KV tensor: its shape, and what other packages learn of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.legs import LegKind
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.attention.kv_tensor import KvShape, describe
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model_runner import TorchRunner
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.node.options import NodeOptions
from baton.node.wiring import identify
from tests.support.hub_configs import HUB_CONFIGS

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def shape_of(name: str, folder: Path) -> KvShape:
    (folder / "config.json").write_text(json.dumps(HUB_CONFIGS[name]), encoding="utf-8")
    return KvShape.of(read_model_config(SafetensorsFolder(folder)), BLOCK_SIZE, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("Llama-3.2-1B", 16 * 2 * 8 * 64 * 2),
        ("DeepSeek-V2-Lite", 27 * (512 + 64) * 2),
        ("DeepSeek-V3", 61 * (512 + 64) * 2),
    ],
)
def test_the_bytes_per_token_are_those_of_keys_and_values_or_of_the_latent(
    name: str, token_bytes: int, tmp_path: Path
) -> None:
    shape = shape_of(name, tmp_path)

    memory = describe(shape.allocate(3, CPU), CacheLayout())

    assert shape.block_bytes == memory.block_bytes == BLOCK_SIZE * token_bytes
    assert memory.num_bytes == 3 * memory.block_bytes
    assert memory.blocks.layer_bytes * memory.blocks.num_layers == memory.block_bytes


def test_a_token_takes_the_sum_of_unlike_layers(tmp_path: Path) -> None:
    shape = shape_of("gemma-4-E4B", tmp_path)

    groups = read_model_config(SafetensorsFolder(tmp_path)).kv_groups()

    token_bytes = (20 * 2 * 2 * 256 + 4 * 2 * 2 * 512) * 2  # of layers with a window, and without
    assert len(groups) * shape.block_bytes == BLOCK_SIZE * token_bytes


def fingerprint_of(shape: KvShape) -> Fingerprint:
    """Return the fingerprint of a node with this KV tensor, whatever its model."""
    info, memory = (
        SimpleNamespace(fingerprint="model"),
        describe(shape.allocate(1, CPU), CacheLayout()),
    )
    runner: Any = SimpleNamespace(info=info, kv_memory=memory)
    options = NodeOptions(RunnerConfig("model"))
    return identify(options, LegKind.DECODE, cast("TorchRunner", runner)).fingerprint


def test_caches_with_and_without_values_are_incompatible(tmp_path: Path) -> None:
    latent = shape_of("DeepSeek-V2-Lite", tmp_path)

    apart = replace(latent, num_tensors=2)

    assert fingerprint_of(latent) == fingerprint_of(latent)
    assert fingerprint_of(latent) != fingerprint_of(apart)
