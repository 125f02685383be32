"""Folders of `tools.make_model` as read by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.families.read_config import read_model_config
from tests.support.random_folders import small_folder
from tools.model_shapes import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_each_shape(name: str, tmp_path: Path) -> None:
    config = SHAPES[name].scale()
    (tmp_path / "config.json").write_text(json.dumps(config))

    theirs, own = (
        AutoConfig.from_pretrained(tmp_path),
        read_model_config(SafetensorsFolder(tmp_path)),
    )

    assert theirs.architectures == [own.architecture]
    assert theirs.num_hidden_layers == own.num_layers
    sizes = theirs.hidden_size, theirs.num_attention_heads, theirs.num_key_value_heads
    # In a latent space all heads share one key.
    num_kv_heads = own.num_heads if own.latent is not None else own.num_kv_heads
    assert sizes == (own.hidden_size, own.num_heads, num_kv_heads)
    if own.moe is not None:
        assert theirs.num_experts_per_tok == own.moe.top_k


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_finds_every_tensor(name: str, tmp_path: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        small_folder(tmp_path, name), output_loading_info=True
    )

    loading = loaded[1]
    assert not any(loading[fault] for fault in ("missing_keys", "unexpected_keys"))
    assert not loading["mismatched_keys"]
