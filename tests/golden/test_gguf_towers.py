"""Vision towers from GGUF files: the encodings and image settings of the same folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.gguf.file_choice import order_projectors
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.engine.runner.kernels.choose import TORCH
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.runner.vision.unloaded_tower import load_tower
from baton.engine.runner.weights.tensor_loading import LoadTarget
from baton.router.pictures.families.table import read_format
from tests.support.gguf_towers import TYPES, finish, write_gguf_with_tower, write_tower_fields
from tests.support.vision import PICTURE_SIZES, a_picture, make_vision_folder

NAMES = ("smolvlm", "gemma3", "gemma4", "gemma4-unified", "qwen2-vl", "qwen2.5-vl", "qwen3-vl")
WITH_POSITIONS = ("smolvlm", "gemma3", "gemma4", "gemma4-unified", "qwen3-vl")
SIZES: Mapping[str, Mapping[str, object]] = {
    "smolvlm": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    "gemma3": {"size": {"height": 64, "width": 64}},
    "gemma4": {},
    "gemma4-unified": {},
    "qwen2-vl": {"min_pixels": 28 * 28, "max_pixels": 100 * 28 * 28},
    "qwen2.5-vl": {"min_pixels": 28 * 28, "max_pixels": 100 * 28 * 28},
    "qwen3-vl": {"min_pixels": 32 * 32, "max_pixels": 100 * 32 * 32},
}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_vision_folder(tmp_path_factory.mktemp(name), name)
    path = made / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SIZES[name]}))
    return made


def encodings(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    config = read_vision_config(checkpoint)
    assert config is not None
    with checkpoint.open_tensors() as files:
        target = LoadTarget(torch.float32, torch.device("cpu"), TORCH)
        tower = load_tower(config, files, target)
    assert tower is not None
    pictures = [a_picture(*size, seed=seed) for seed, size in enumerate(PICTURE_SIZES[name][:2])]
    return torch.cat(tower.encode(pictures))


def test_a_tower_in_a_file_next_to_the_model_gives_the_encodings_of_the_folder(
    name: str, folder: Path, tmp_path: Path
) -> None:
    # Early files have the names of two matrices swapped.
    write_gguf_with_tower(folder, tmp_path, swaps_mlp=name in ("gemma3", "qwen2-vl"))
    found = open_checkpoint(str(tmp_path))  # the only model there

    expected = SafetensorsFolder(folder)
    assert torch.equal(encodings(found, name), encodings(expected, name))
    assert read_format(found) == read_format(expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_tower_in_fewer_bits_gives_similar_encodings(
    name: str, folder: Path, tmp_path: Path, kind: str
) -> None:
    write_gguf_with_tower(folder, tmp_path, kind=kind)
    found = encodings(open_checkpoint(str(tmp_path)), name).flatten()
    expected = encodings(SafetensorsFolder(folder), name).flatten()

    assert not torch.equal(found, expected)
    assert torch.cosine_similarity(found, expected, dim=0) > 0.99


def test_a_tower_can_be_in_another_folder(name: str, folder: Path, tmp_path: Path) -> None:
    path = write_gguf_with_tower(folder, tmp_path)
    (tmp_path / "other").mkdir()
    tower = next(tmp_path.glob("mmproj*")).rename(tmp_path / "other" / "tower.gguf")

    assert read_format(open_checkpoint(str(path))) is None
    found = open_checkpoint(str(path), mmproj=str(tower))
    assert torch.equal(encodings(found, name), encodings(SafetensorsFolder(folder), name))
    with pytest.raises(ModelError, match="no vision tower"):
        open_checkpoint(str(path), mmproj=str(path))
    with pytest.raises(ModelError, match="is for GGUF files"):
        open_checkpoint(str(folder), mmproj=str(tower))


def test_a_tower_that_does_not_fit_leaves_a_model_of_text(
    name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf_with_tower(folder, tmp_path)
    tower = next(tmp_path.glob("mmproj*"))
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    config["text_config"]["hidden_size"] += 1
    rewrite(tower, config, processor)

    checkpoint = open_checkpoint(str(path))
    with caplog.at_level(logging.WARNING):
        assert read_vision_config(checkpoint) is None
        assert read_format(checkpoint) is None

    assert "embeddings of 65 numbers" in caplog.text
    with checkpoint.open_tensors() as files:
        assert not [each for each in files.names() if "vision" in each]


def rewrite(path: Path, config: dict[str, Any], processor: dict[str, Any]) -> None:
    path.unlink()
    writer = gguf.GGUFWriter(path, "clip")
    write_tower_fields(writer, config, processor)
    finish(writer)


def test_tensors_and_types_that_are_not_known_are_refused_by_name(
    name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf_with_tower(folder, tmp_path)
    tower = next(tmp_path.glob("mmproj*"))
    content = tower.read_bytes()
    tower.write_bytes(content.replace(b"v.patch_embd.weight", b"v.pitch_embd.weight"))
    with pytest.raises(ModelError, match=r"v\.pitch_embd\.weight"):
        open_checkpoint(str(path)).open_tensors()

    kind = TYPES[json.loads((folder / "config.json").read_text())["model_type"]]
    tower.write_bytes(content.replace(kind.encode(), kind[:-1].encode() + b"9"))
    with caplog.at_level(logging.WARNING):
        assert read_format(open_checkpoint(str(path))) is None
    known = "gemma3, gemma4uv, gemma4v, idefics3, qwen2vl_merger"
    assert f"which Baton does not read from GGUF; it reads {known}" in caplog.text


@pytest.mark.parametrize("name", WITH_POSITIONS, indirect=True)
@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 2, 3, 5)])
def test_a_table_of_positions_of_another_shape_is_refused_by_name(
    name: str, folder: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    path = write_gguf_with_tower(folder, tmp_path)
    tower = next(tmp_path.glob("mmproj*"))
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    tower.unlink()
    writer = gguf.GGUFWriter(tower, "clip")
    write_tower_fields(writer, config, processor)
    writer.add_tensor("v.position_embd.weight", np.zeros(shape, np.float32))
    finish(writer)

    with pytest.raises(ModelError):
        encodings(open_checkpoint(str(path)), name)


def test_the_most_exact_of_the_usual_files_is_taken() -> None:
    names = ["mmproj-Q8_0.gguf", "tiny.gguf", "mmproj-F32.gguf", "mmproj-model-f16.gguf", "mmproj"]

    assert order_projectors(names) == ["mmproj-model-f16.gguf", "mmproj-F32.gguf", names[0]]
