"""An image has as many placeholders as its encoding by the model's tower has rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.vision.read_config import read_vision_config
from baton.router.pictures.families.table import read_format
from baton.router.pictures.plan import Size
from tests.support.vision import VISION_VARIANTS, make_vision_folder

PROCESSORS: dict[str, dict[str, object]] = {
    "idefics3": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    "smolvlm": {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}},
    "mistral3": {"size": {"longest_edge": 280}},
    "gemma3": {"size": {"height": 64, "width": 64}},
    **{name: {"max_soft_tokens": 70} for name in ("gemma4", "gemma4-large", "gemma4-unified")},
}
OF_QWEN = {"size": {"shortest_edge": 64 * 64, "longest_edge": 1 << 17}}


@pytest.mark.parametrize("name", VISION_VARIANTS)
def test_placeholders_are_the_rows_of_an_encoding(tmp_path: Path, name: str) -> None:
    folder = make_vision_folder(tmp_path / name, name)
    settings = folder / "preprocessor_config.json"
    settings.write_text(
        json.dumps({**json.loads(settings.read_text()), **PROCESSORS.get(name, OF_QWEN)})
    )
    checkpoint = SafetensorsFolder(folder)
    tower, pictures = read_vision_config(checkpoint), read_format(checkpoint)
    assert tower is not None
    assert pictures is not None

    for image in (Size(1, 1), Size(640, 480), Size(90, 700)):
        for tile in pictures.plan(image).tiles:
            grid = tower.token_grid(tile.size.height, tile.size.width)
            assert (tile.rows, tile.columns) == grid
