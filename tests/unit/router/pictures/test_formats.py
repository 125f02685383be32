"""Formats of images, read from the files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest, ModelError
from baton.router.pictures.families.gemma3 import Gemma3Format
from baton.router.pictures.families.idefics3 import Idefics3Format
from baton.router.pictures.families.pixtral import PixtralFormat
from baton.router.pictures.families.qwen_vl import QwenVlFormat
from baton.router.pictures.families.table import read_format
from baton.router.pictures.plan import Detail, PictureFormat, Size

SMOLVLM = {"model_type": "smolvlm", "scale_factor": 4, "vision_config": {"patch_size": 16}}
SMOLVLM_IMAGES = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
QWEN = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}


def format_of(folder: Path, config: dict[str, Any], **files: object) -> PictureFormat | None:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_format(SafetensorsFolder(folder))


@pytest.mark.parametrize(
    ("config", "processor", "expected"),
    [
        (SMOLVLM, SMOLVLM_IMAGES, Idefics3Format(2048, 512, 8, True, 1)),
        (
            {"model_type": "mistral3", "vision_config": {"patch_size": 14}},
            {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
            PixtralFormat(1540, 28, 3),
        ),
        (
            {"model_type": "gemma3", "vision_config": {}},
            {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None},
            Gemma3Format(Size(896, 896), 16, 2),
        ),
        (
            QWEN,
            {"size": {"shortest_edge": 65536, "longest_edge": 1 << 24}, "patch_size": 16},
            QwenVlFormat(65536, 1 << 24, 32, 3),
        ),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {}},
            {"min_pixels": 3136, "max_pixels": 12845056, "resample": 3},
            QwenVlFormat(3136, 12845056, 28, 3),
        ),
    ],
)
def test_published_settings_are_read(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], expected: PictureFormat
) -> None:
    assert format_of(tmp_path, config, preprocessor_config=processor) == expected


def test_settings_within_those_of_the_processor_come_first(tmp_path: Path) -> None:
    within = {"image_processor": {**SMOLVLM_IMAGES, "do_image_splitting": False}}

    found = format_of(tmp_path, SMOLVLM, preprocessor_config={}, processor_config=within)

    assert found == Idefics3Format(2048, 512, 8, False, 1)


def test_a_model_of_text_alone_has_no_format(tmp_path: Path) -> None:
    assert format_of(tmp_path, {"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("config", "processor", "problem"),
    [
        (
            {"model_type": "blip", "vision_config": {}},
            {},
            "'blip'; it must be one of gemma3, gemma4, ",
        ),
        (QWEN, {"resample": 9}, "'resample' is 9; it must be a filter of Pillow, 0 to 5"),
        (QWEN, {"do_resize": False}, "'do_resize' is False; it must be true"),
        (
            {"model_type": "gemma3", "vision_config": {}},
            {"do_pan_and_scan": True},
            "'do_pan_and_scan' is True; it must be false",
        ),
    ],
)
def test_what_baton_does_not_know_is_named(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        format_of(tmp_path, config, preprocessor_config=processor)


def test_a_folder_without_the_settings_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        format_of(tmp_path, QWEN)


@pytest.mark.parametrize(
    ("pictures", "num_tokens"),
    [
        (Idefics3Format(2048, 512, 8, True, 1), 64),
        (PixtralFormat(1540, 28, 3), 19 * 10),
        (QwenVlFormat(65536, 1 << 24, 32, 3), 11 * 22),
        (Gemma3Format(Size(896, 896), 16, 2), 256),
    ],
)
def test_low_detail_takes_fewest_tokens(pictures: PictureFormat, num_tokens: int) -> None:
    plan = pictures.plan(Size(4000, 2000), Detail.LOW)

    assert [tile.num_tokens for tile in plan.tiles] == [num_tokens]
    assert plan.text.count(pictures.placeholder) == num_tokens


def test_an_image_of_a_refused_shape_is_named() -> None:
    with pytest.raises(InvalidRequest, match="has 1x201 pixels; the longer edge may be 200 times"):
        QwenVlFormat(3136, 1 << 20, 28, 3).plan(Size(1, 201))
