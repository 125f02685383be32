from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidConfig
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.mtp_head import open_mtp
from baton.engine.runner.families.read_config import read_model_config
from tests.support.hub_configs import HUB_CONFIGS

HAS_NONE = "has no layer for multi-token prediction"
IS_UNREAD = "Baton does not read the layers for multi-token prediction in"
INSTEAD = ": use suffix:8, which needs no other files, or --speculative-model with a head (eagle3:3"


def error_of(folder: Path, name: str, tensor: str) -> str:
    """Return the message for a model with such a configuration and one tensor."""
    (folder / "config.json").write_text(json.dumps(HUB_CONFIGS[name]), encoding="utf-8")
    save_file({tensor: torch.zeros(1)}, folder / "model.safetensors")
    checkpoint = SafetensorsFolder(folder)
    with pytest.raises(InvalidConfig) as caught:
        open_mtp(RunnerConfig(str(folder)), checkpoint, read_model_config(checkpoint))
    return str(caught.value)


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_a_model_without_mtp_layer_is_refused_with_what_can_be_used_instead(
    name: str, tmp_path: Path
) -> None:
    message = error_of(tmp_path, name, "model.embed_tokens.weight")

    assert f"{tmp_path} {HAS_NONE}{INSTEAD}" in message


@pytest.mark.parametrize("name", HUB_CONFIGS)
@pytest.mark.parametrize("tensor", ["mtp.layers.0.eh_proj.weight", "model.mtp_block.0.mlp.weight"])
def test_an_mtp_layer_that_baton_does_not_read_is_named_as_such(
    name: str, tensor: str, tmp_path: Path
) -> None:
    message = error_of(tmp_path, name, tensor)

    assert f"{IS_UNREAD} {tmp_path}{INSTEAD}" in message
