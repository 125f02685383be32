"""Time of a vision tower per picture: Baton, transformers and llama.cpp in turns.

Baton and transformers share a process. llama.cpp's libmtmd has one of its own, and reads the
same GGUF files as Baton then.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig
from baton.core.media import DIGEST_BYTES, Picture
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.runner.vision.unloaded_tower import load_tower
from baton.engine.runner.weights.tensor_loading import LoadTarget
from benchmarks.peers.peer_process import PeerProcess, start_peer

TEXT = {
    "vocab_size": 320,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}
MEAN = DEVIATION = (0.5, 0.5, 0.5)  # of pixels
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GGUF_KINDS = {"bfloat16": "F16", "float32": "F32"}  # of matrices; llama.cpp is slower with BF16
WORKER = Path(__file__).with_name("mtmd_worker.py")


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A tower as transformers names it, and the side of its picture in pixels."""

    family: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    outer: Mapping[str, Any]
    layers_field: str
    side: int


SHAPES: Mapping[str, TowerShape] = {
    "siglip-base": TowerShape(  # of SmolVLM-256M
        family="SmolVLM",
        text={"model_type": "llama"},
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
        text={"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
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
    "qwen3-vl": TowerShape(
        family="Qwen3VL",
        text={
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "rope_parameters": {**MROPE, "mrope_interleaved": True},
        },
        vision={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        outer={},
        layers_field="depth",
        side=512,
    ),
}


@dataclass(frozen=True, slots=True)
class VisionBench:
    shape: str
    layers: int | None  # None: as published
    dtype: str
    num_threads: int
    num_rounds: int
    quantize: str = "none"  # or int8: of Baton and llama.cpp
    llamacpp_venv: Path | None = None


@dataclass(frozen=True, slots=True)
class TowerFigure:
    """Medians over the rounds."""

    engine: str
    cpu_s: float
    elapsed_s: float
    baton_is_faster: float  # ratio of CPU times, by round
    elapsed_ratio: float
    cosine: float  # of its encoding and Baton's


@dataclass(frozen=True, slots=True)
class Engine:
    """A tower that encodes the picture."""

    measure: Callable[[], tuple[float, float]]  # encodes: CPU and elapsed seconds
    encoding: Tensor


def run(bench: VisionBench, folder: Path) -> list[TowerFigure]:
    """Write a tower with random weights into the folder, and measure it. Raises PeerFailed."""
    torch.set_num_threads(bench.num_threads)
    shape = SHAPES[bench.shape]
    size = (shape.side, shape.side, 3)
    picture = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    with torch.inference_mode(), ExitStack() as ends:
        engines = {"transformers": _transformers(bench, shape, folder, picture)}
        model = str(folder)
        if bench.llamacpp_venv is not None:
            model = _write_gguf(bench, folder)
            engines["llama.cpp"] = _llamacpp(bench, bench.llamacpp_venv, model, picture, ends)
        engines["baton"] = own = _baton(bench, model, picture)
        times = [
            {name: engine.measure() for name, engine in engines.items()}
            for _ in range(bench.num_rounds)
        ]
        return [
            _figure(
                name,
                [each[name] for each in times],
                [each["baton"] for each in times],
                functional.cosine_similarity(
                    engine.encoding.flatten(), own.encoding.flatten(), dim=0
                ).item(),
            )
            for name, engine in engines.items()
        ]


def _figure(
    name: str, times: list[tuple[float, float]], own: list[tuple[float, float]], cosine: float
) -> TowerFigure:
    cpu_s, elapsed_s = (statistics.median(column) for column in zip(*times, strict=True))
    cpu_ratio, elapsed_ratio = (
        statistics.median(a[column] / b[column] for a, b in zip(times, own, strict=True))
        for column in (0, 1)
    )
    return TowerFigure(
        name,
        round(cpu_s, 2),
        round(elapsed_s, 2),
        round(cpu_ratio, 2),
        round(elapsed_ratio, 2),
        round(cosine, 4),
    )


def _engine(encode: Callable[[], Tensor]) -> Engine:
    """Return an engine of this process, after a warm-up."""

    def measure() -> tuple[float, float]:
        cpu_s, elapsed_s = process_time(), perf_counter()
        encode()
        return process_time() - cpu_s, perf_counter() - elapsed_s

    return Engine(measure, encode().float())


def _transformers(
    bench: VisionBench, shape: TowerShape, folder: Path, picture: np.ndarray
) -> Engine:
    """Write the tower, and return the engine."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise InvalidConfig("transformers is missing here: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    vision = dict(shape.vision)
    if bench.layers is not None:
        vision[shape.layers_field] = bench.layers
        vision |= _layers_in_range(vision, bench.layers)
    config = getattr(transformers, f"{shape.family}Config")(
        text_config={**TEXT, **shape.text}, vision_config=vision, **shape.outer
    )
    model = getattr(transformers, f"{shape.family}ForConditionalGeneration")(config)
    model = model.to(DTYPES[bench.dtype]).eval()
    model.save_pretrained(folder)
    processor = {"rescale_factor": 1 / 255, "image_mean": MEAN, "image_std": DEVIATION}
    side = shape.side
    limits = {"size": {"longest_edge": side}, "min_pixels": side**2, "max_pixels": side**2}
    limits |= {"max_image_size": {"longest_edge": side}}
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**processor, **limits}), encoding="utf-8")
    inputs = _transformers_inputs(shape, picture)

    def encode() -> Tensor:
        found = model.get_image_features(**inputs, return_dict=True)
        levels = getattr(found, "deepstack_features", None) or []
        return torch.cat([torch.cat(list(part)) for part in (found.pooler_output, *levels)], dim=1)

    return _engine(encode)


def _layers_in_range(vision: Mapping[str, Any], num_layers: int) -> dict[str, list[int]]:
    """Return lists of layers without those that are left out."""
    name = "deepstack_visual_indexes"
    return {name: [at for at in vision[name] if at < num_layers]} if name in vision else {}


def _transformers_inputs(shape: TowerShape, picture: np.ndarray) -> dict[str, Tensor]:
    pixels = (torch.from_numpy(picture).permute(2, 0, 1) / 255 - MEAN[0]) / DEVIATION[0]
    if shape.family == "SmolVLM":
        return {"pixel_values": pixels[None, None]}
    size = shape.vision.get("patch_size", 16 if shape.family == "Qwen3VL" else 14)
    count = shape.side // size
    squares = pixels.reshape(3, count // 2, 2, size, count // 2, 2, size)
    patches = squares.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
    return {
        "pixel_values": patches[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1),
        "image_grid_thw": torch.tensor([[1, count, count]]),
    }


def _baton(bench: VisionBench, model: str, picture: np.ndarray) -> Engine:
    checkpoint, place = open_checkpoint(model), torch.device("cpu")
    config, dtype = read_vision_config(checkpoint), DTYPES[bench.dtype]
    assert config is not None
    with checkpoint.open_tensors() as files:
        parts = choose_parts("auto", dtype, place)
        tower = load_tower(config, files, LoadTarget(dtype, place, parts, bench.quantize))
    assert tower is not None
    height, width, _ = picture.shape
    pictures = [Picture(bytes(DIGEST_BYTES), height, width, picture.tobytes())]
    return _engine(lambda: tower.encode(pictures)[0])


def _write_gguf(bench: VisionBench, folder: Path) -> str:
    """Write the folder as two GGUF files of the same name, and return that of the text."""
    from tests.support.gguf_towers import write_gguf_with_tower
    from tests.support.models import save_tokenizer

    save_tokenizer(folder)
    kind = "Q8_0" if bench.quantize == "int8" else GGUF_KINDS[bench.dtype]
    return str(write_gguf_with_tower(folder, folder, kind=kind))


def _llamacpp(
    bench: VisionBench, venv: Path, model: str, picture: np.ndarray, ends: ExitStack
) -> Engine:
    folder = Path(model).parent
    rgb, encoding, log = (folder / name for name in ("picture.rgb", "encoding", "llamacpp.log"))
    rgb.write_bytes(picture.tobytes())
    height, width, _ = picture.shape
    [mmproj] = folder.glob("mmproj*")
    settings = {
        "model": model,
        "mmproj": str(mmproj),
        "rgb": str(rgb),
        "height": height,
        "width": width,
        "encoding": str(encoding),
        "num_threads": bench.num_threads,
    }
    process = ends.enter_context(start_peer(venv, WORKER, settings, {}, log))
    peer = PeerProcess("llama.cpp", process, log)

    def measure() -> tuple[float, float]:
        cpu_s, elapsed_s = json.loads(peer.request())
        return cpu_s, elapsed_s

    return Engine(measure, torch.from_numpy(np.fromfile(encoding, np.float32)))
