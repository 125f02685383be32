"""Encodings of pictures equal those of transformers, alone and beside others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.core.sampling import SamplingParams
from baton.engine.runner.kernels.choose import TORCH, native_parts
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.runner.vision.tower import VisionTower
from baton.engine.runner.vision.unloaded_tower import load_tower
from baton.engine.runner.weights.tensor_loading import LoadTarget
from baton.llm import LLM
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of, reference_greedy
from tests.support.vision import (
    PICTURE_SIZES,
    VISION_VARIANTS,
    a_picture,
    make_vision_folder,
    reference_encoding,
)

FolderOf = Callable[[str], Path]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_vision_folder(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


FLOAT32 = LoadTarget(torch.float32, torch.device("cpu"), TORCH)


def open_tower(folder: Path, target: LoadTarget = FLOAT32) -> VisionTower:
    checkpoint = SafetensorsFolder(folder)
    config = read_vision_config(checkpoint)
    assert config is not None
    with checkpoint.open_tensors() as files:
        tower = load_tower(config, files, target)
    assert tower is not None
    return tower


@pytest.mark.parametrize("name", VISION_VARIANTS)
def test_encodings_equal_those_of_transformers(name: str, folder_of: FolderOf) -> None:
    folder = folder_of(name)
    tower, sizes = open_tower(folder), PICTURE_SIZES[name]
    pictures = [a_picture(*size, seed=index) for index, size in enumerate(sizes)]
    together = tower.encode(pictures)

    for picture, encoding in zip(pictures, together, strict=True):
        wanted = reference_encoding(folder, picture)
        num_tokens = tower.config.num_tokens(picture.height, picture.width)
        assert encoding.shape == wanted.shape == (num_tokens, tower.config.encoding_size)
        assert (encoding - wanted).abs().max() < TOLERANCE
        assert torch.equal(tower.encode([picture])[0], encoding)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_the_text_beside_a_tower_equals_that_of_transformers(
    name: str, folder_of: FolderOf
) -> None:
    prompt = list(prompt_of(20))
    with LLM(str(folder_of(name)), dtype="float32", show_progress=False) as llm:
        [answer] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6))
    assert answer.token_ids == reference_greedy(folder_of(name), prompt, 6)


def test_pictures_of_wrong_sizes_are_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="30x28 pixels: multiples of 28"):
        open_tower(folder_of("mistral3")).encode([a_picture(28, 30)])
    with pytest.raises(ValueError, match="128x64 pixels instead of 64x64"):
        open_tower(folder_of("gemma3")).encode([a_picture(64, 128)])
    with pytest.raises(ValueError, match="816x16 pixels: at most 800 along a side"):
        open_tower(folder_of("gemma4")).encode([a_picture(16, 816)])


def test_tensors_of_a_tower_are_checked(folder_of: FolderOf, tmp_path: Path) -> None:
    for file in folder_of("qwen3-vl").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder_of("qwen3-vl") / "model.safetensors")
    name = "model.visual.blocks.1.attn.qkv.weight"

    def refused(changed: dict[str, torch.Tensor], cause: str) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=cause):
            open_tower(tmp_path)

    refused({key: value for key, value in weights.items() if key != name}, f"lacks {name}")
    refused(
        {**weights, "model.visual.extra": weights[name].clone()}, "does not use: model.visual.extra"
    )
    refused({**weights, name: weights[name][1:]}, f"{name} has the shape")


@pytest.mark.parametrize("name", VISION_VARIANTS)
def test_encodings_are_computed_where_the_weights_are(name: str, folder_of: FolderOf) -> None:
    place = torch.device("meta")  # refuses to compute with tensors elsewhere
    tower = open_tower(folder_of(name), LoadTarget(torch.bfloat16, place, TORCH))
    [encoding] = tower.encode([a_picture(*PICTURE_SIZES[name][0])])
    assert encoding.device == place


def test_folders_without_the_tower_have_none(folder_of: FolderOf, tmp_path: Path) -> None:
    weights = load_file(folder_of("gemma3") / "model.safetensors")
    text = {name: tensor for name, tensor in weights.items() if "language_model" in name}
    save_file(text, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder_of("gemma3") / "config.json").read_bytes())
    checkpoint = SafetensorsFolder(tmp_path)
    config = read_vision_config(checkpoint)
    assert config is not None
    with checkpoint.open_tensors() as files:
        assert load_tower(config, files, FLOAT32) is None


def test_a_model_of_text_has_no_tower(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, VARIANTS["llama"])
    assert read_vision_config(SafetensorsFolder(folder)) is None


@pytest.mark.parametrize(
    ("name", "place", "fields", "cause"),
    [
        ("gemma3", "", {"architectures": ["Llama4ForConditionalGeneration"]}, "one of Idefics3"),
        ("mistral3", "", {"vision_feature_layer": -2}, "vision_feature_layer.*must be -1"),
        ("smolvlm", "vision_config", {"hidden_act": "relu"}, "hidden_act.*gelu"),
        ("smolvlm", "vision_config", {"num_channels": 4}, "num_channels.*must be 3"),
        ("gemma4", "vision_config", {"num_key_value_heads": 1}, "num_key_value_heads.*must be 2"),
        ("qwen3-vl", "vision_config", {"out_hidden_size": 32}, "text model \\(64\\)"),
        ("qwen3-vl", "vision_config", {"deepstack_visual_indexes": [2, 0]}, "in order"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    name: str,
    place: str,
    fields: dict[str, object],
    cause: str,
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    config = json.loads((folder_of(name) / "config.json").read_text())
    (config[place] if place else config).update(fields)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=cause):
        read_vision_config(SafetensorsFolder(tmp_path))


@pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("name", VISION_VARIANTS)
def test_native_encodings_in_bfloat16_resemble_those_in_float32(
    name: str, quantize: str, folder_of: FolderOf
) -> None:
    pictures = [a_picture(*size) for size in PICTURE_SIZES[name][:2]]
    wide = open_tower(folder_of(name)).encode(pictures)
    target = LoadTarget(torch.bfloat16, torch.device("cpu"), native_parts(), quantize)
    tower = open_tower(folder_of(name), target)
    together = tower.encode(pictures)

    for picture, encoding, wanted in zip(pictures, together, wide, strict=True):
        assert encoding.dtype == torch.bfloat16
        found = encoding.float().flatten()
        assert functional.cosine_similarity(found, wanted.flatten(), dim=0) > 0.99
        assert torch.equal(tower.encode([picture])[0], encoding)


@pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
@pytest.mark.parametrize("name", VISION_VARIANTS)
def test_integers_are_as_near_to_float32_as_bfloat16(name: str, folder_of: FolderOf) -> None:
    [picture] = [a_picture(*size) for size in PICTURE_SIZES[name][:1]]
    [wanted] = open_tower(folder_of(name)).encode([picture])

    def error(activation_dtype: str) -> float:
        parts = native_parts(activation_dtype)
        target = LoadTarget(torch.bfloat16, torch.device("cpu"), parts)
        [encoding] = open_tower(folder_of(name), target).encode([picture])
        return float((encoding.float() - wanted).norm() / wanted.norm())

    assert error("auto") <= 1.3 * error("bfloat16")
