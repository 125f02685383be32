"""Time of a vision tower per picture: Baton and transformers in turns, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidConfig
from baton.core.media import DIGEST_BYTES, Picture
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.runner.vision.unloaded_tower import load_tower
from baton.engine.runner.weights.tensor_loading import LoadTarget

TEXT = {
    "vocab_size": 320,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A tower as transformers names it, and the side of its picture in pixels."""

    family: str
    text_type: str
    vision: Mapping[str, Any]
    outer: Mapping[str, Any]
    layers_field: str
    side: int


SHAPES: Mapping[str, TowerShape] = {
    "siglip-base": TowerShape(  # of SmolVLM-256M
        family="SmolVLM",
        text_type="llama",
        vision={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        outer={"scale_factor": 4},
        layers_field="num_hidden_layers",
        side=512,
    ),
    "qwen2.5-vl": TowerShape(
        family="Qwen2_5_VL",
        text_type="qwen2_5_vl_text",
        vision={
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "depth": 32,
            "num_heads": 16,
            "out_hidden_size": 2048,
        },
        outer={},
        layers_field="depth",
        side=504,
    ),
}


@dataclass(frozen=True, slots=True)
class VisionBench:
    shape: str
    layers: int | None  # None: as published
    dtype: str
    num_threads: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class TowerFigure:
    """Medians over the rounds."""

    engine: str
    cpu_s: float
    elapsed_s: float
    baton_is_faster: float  # ratio of CPU times, by round


def run(bench: VisionBench, folder: Path) -> list[TowerFigure]:
    """Write a tower with random weights into the folder, and measure it."""
    torch.set_num_threads(bench.num_threads)
    shape = SHAPES[bench.shape]
    encoders = {
        "transformers": _transformers_encoder(bench, shape, folder),
        "baton": _own_encoder(bench, shape, folder),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in encoders}
    with torch.inference_mode():
        for encode in encoders.values():
            encode()
        for _ in range(bench.num_rounds):
            for name, encode in encoders.items():
                cpu_s, elapsed_s = process_time(), perf_counter()
                encode()
                times[name].append((process_time() - cpu_s, perf_counter() - elapsed_s))
    return [_figure(name, own, times["baton"]) for name, own in times.items()]


def _figure(
    name: str, times: list[tuple[float, float]], own: list[tuple[float, float]]
) -> TowerFigure:
    cpu_s, elapsed_s = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a[0] / b[0] for a, b in zip(times, own, strict=True))
    return TowerFigure(name, round(cpu_s, 2), round(elapsed_s, 2), round(ratio, 2))


def _transformers_encoder(
    bench: VisionBench, shape: TowerShape, folder: Path
) -> Callable[[], object]:
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise InvalidConfig("transformers is missing here: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    vision = dict(shape.vision)
    if bench.layers is not None:
        vision[shape.layers_field] = bench.layers
    text = {**TEXT, "model_type": shape.text_type}
    config = getattr(transformers, f"{shape.family}Config")(
        text_config=text, vision_config=vision, **shape.outer
    )
    model = getattr(transformers, f"{shape.family}ForConditionalGeneration")(config)
    model = model.to(DTYPES[bench.dtype]).eval()
    model.save_pretrained(folder)
    inputs = _transformers_inputs(shape)
    return lambda: model.get_image_features(**inputs)


def _transformers_inputs(shape: TowerShape) -> dict[str, torch.Tensor]:
    side = shape.side
    if shape.family == "SmolVLM":
        return {"pixel_values": torch.randn(1, 1, 3, side, side)}
    patches = side // 14
    return {
        "pixel_values": torch.randn(patches**2, 3 * 2 * 14**2),
        "image_grid_thw": torch.tensor([[1, patches, patches]]),
    }


def _own_encoder(bench: VisionBench, shape: TowerShape, folder: Path) -> Callable[[], object]:
    checkpoint, place = SafetensorsFolder(folder), torch.device("cpu")
    config, dtype = read_vision_config(checkpoint), DTYPES[bench.dtype]
    assert config is not None
    with checkpoint.open_tensors() as files:
        target = LoadTarget(dtype, place, choose_parts("auto", dtype, place))
        tower = load_tower(config, files, target)
    assert tower is not None
    size = (shape.side, shape.side, 3)
    rgb = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes()
    picture = Picture(bytes(DIGEST_BYTES), shape.side, shape.side, rgb)
    return lambda: tower.encode([picture])
