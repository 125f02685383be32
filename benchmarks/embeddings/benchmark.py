"""Embeddings per second of CPU time: Baton and its peers in turns, in one process."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

from baton.core.vectors import Floats
from baton.engine.runner.encoders.native_encoder import pack_linear
from baton.engine.runner.kernels.choose import encoder_kernels
from baton.engine.runner.model.linear import TorchLinear
from benchmarks.embeddings.engines import BATON, DTYPES, Embed, engines
from benchmarks.embeddings.work import products_of
from tools.make_model import make_model
from tools.model_shapes import SHAPES

NUM_WORDS = (3, 8, 20, 50, 5, 12, 30, 90)
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "in",
    "many",
    "lengths",
)
PEAK_SIZE, PEAK_RUNS = 1024, 3
LAST_TOKEN = {"pooling_mode_lasttoken": True}
PADDING = "!"  # in no text
MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingsBench:
    model: Path
    dtype: str
    num_threads: int
    peers: tuple[str, ...]
    counts: Sequence[int]
    num_texts: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """Medians over the rounds, of one engine and one number of texts in a call."""

    engine: str
    texts: int
    texts_per_cpu_s: float
    texts_per_s: float
    baton_is_faster: float  # ratio of CPU times, by round
    share_of_limit: float  # of the arithmetic that the texts need, by CPU time
    max_difference: float


@dataclass(frozen=True, slots=True)
class EmbeddingFigures:
    peak_gflops: float
    rows: Sequence[EngineFigure]


@dataclass(frozen=True, slots=True)
class _Times:
    cpu_s: list[float]
    elapsed_s: list[float]


def run(bench: EmbeddingsBench, on_missing: Callable[[str], None]) -> EmbeddingFigures:
    """Run all rounds. Engines that are missing are reported and left out."""
    texts = make_texts(bench.num_texts)
    rows: list[EngineFigure] = []
    peaks: list[float] = []
    with engines(bench.model, bench.dtype, bench.num_threads, bench.peers, on_missing) as opened:
        vectors = {name: embed(texts) for name, embed in opened.items()}  # warms up, too
        flops = 2 * products_of(bench.model, texts)
        for count in bench.counts:
            times = _rounds(opened, texts, count, bench, peaks)
            rows += _figures(times, vectors, count, flops, max(peaks), len(texts))
    return EmbeddingFigures(max(peaks) / 1e9, rows)


def make_texts(count: int) -> list[str]:
    draw = random.Random(1)
    return [
        " ".join(draw.choice(WORDS) for _ in range(NUM_WORDS[index % len(NUM_WORDS)]))
        for index in range(count)
    ]


def make_shape(folder: Path, shape: str, layers: int | None, dtype: str) -> None:
    """Write a decoder with random weights in the layout of sentence-transformers."""
    make_model(folder, SHAPES[shape].scale(layers), dtype)
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for index, (path, name) in enumerate(zip(paths, MODULES, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PADDING}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))  # peers pad
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": False, **LAST_TOKEN}
    (folder / paths[1] / "config.json").write_text(json.dumps(pooling))


def _rounds(
    opened: Mapping[str, Embed],
    texts: Sequence[str],
    count: int,
    bench: EmbeddingsBench,
    peaks: list[float],
) -> dict[str, _Times]:
    times = {name: _Times([], []) for name in opened}
    names = list(opened)
    for number in range(bench.num_rounds):
        peaks.append(_peak_flops(DTYPES[bench.dtype]))
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            cpu_s, elapsed_s = process_time(), perf_counter()
            for first in range(0, len(texts), count):
                opened[name](texts[first : first + count])
            times[name].cpu_s.append(process_time() - cpu_s)
            times[name].elapsed_s.append(perf_counter() - elapsed_s)
    return times


def _peak_flops(dtype: torch.dtype) -> float:
    """Return the best rate of a large product, of float32 or this dtype, by CPU time.

    The products are those of torch, and Baton's of float32, which are faster on some processors.
    """
    numbers = torch.ones(PEAK_SIZE, PEAK_SIZE)
    products = [
        partial(torch.mm, numbers.to(kind), numbers.to(kind)) for kind in {torch.float32, dtype}
    ]
    kernels = encoder_kernels("auto", torch.float32, torch.device("cpu"))
    if kernels is not None:
        products.append(partial(pack_linear(TorchLinear(numbers, None), kernels), numbers))
    best = 0.0
    for product in products:
        for _ in range(PEAK_RUNS):
            began_s = process_time()
            product()
            best = max(best, 2 * PEAK_SIZE**3 / (process_time() - began_s))
    return best


def _figures(
    times: Mapping[str, _Times],
    vectors: Mapping[str, Floats],
    count: int,
    flops: float,
    peak: float,
    num_texts: int,
) -> list[EngineFigure]:
    own = times[BATON].cpu_s
    return [
        EngineFigure(
            engine=name,
            texts=count,
            texts_per_cpu_s=round(num_texts / statistics.median(one.cpu_s), 1),
            texts_per_s=round(num_texts / statistics.median(one.elapsed_s), 1),
            baton_is_faster=round(
                statistics.median(a / b for a, b in zip(one.cpu_s, own, strict=True)), 2
            ),
            share_of_limit=round(flops / statistics.median(one.cpu_s) / peak, 3),
            max_difference=float(np.abs(vectors[name] - vectors[BATON]).max()),
        )
        for name, one in times.items()
    ]
