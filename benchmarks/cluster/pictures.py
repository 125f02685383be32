"""Cost of pictures for others: token gaps of text streams, memory of decode nodes, encodings."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from io import BytesIO
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
from PIL import Image

from baton.client import AsyncClient, Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams
from baton.telemetry.metrics import names
from benchmarks.chaos.leaks import MIB, Scrape, resident_bytes, scrape

METRICS_AT = re.compile(r"metrics on (http://\S+)")
PERCENTILE = 99
STREAM_TOKENS, PROMPT = 256, "def read(path):\n"
QUESTION = "Which number is in the picture?"
SIDE = 512  # pixels: one tile
TOWER = {  # SigLIP-base, as SmolVLM-256M has it
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIDE,
    "patch_size": 16,
}
SCALE_FACTOR = 4
PROCESSOR = "processor_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class PicturesBench:
    """One prefill and one decode node, with text streams, and a picture now and then."""

    model: str  # whose text part and tokenizer are taken
    num_streams: int = 2
    window_s: float = 60.0
    num_rounds: int = 3  # of a window without pictures, and one with them
    pictures_per_minute: float = 4.0
    num_turns: int = 20  # of a chat in which one picture is sent each time


@dataclass(frozen=True, slots=True)
class PictureFigure:
    what: str
    without: float
    with_pictures: float
    ratio: float


def make_folders(bench: PicturesBench, folder: Path) -> tuple[Path, Path]:
    """Write the text part of the model with a large tower, and alone. Return both folders.

    The tower has random weights. Raises InvalidConfig.
    """
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise InvalidConfig("transformers is missing here: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    seeing = transformers.Idefics3ForConditionalGeneration
    small = seeing.from_pretrained(bench.model, dtype="bfloat16")
    fields = small.config.to_dict() | {"vision_config": TOWER, "scale_factor": SCALE_FACTOR}
    large = seeing(transformers.Idefics3Config.from_dict(fields)).bfloat16()
    large.model.text_model.load_state_dict(small.model.text_model.state_dict())
    large.save_pretrained(folder / "seeing")
    blind = transformers.LlamaForCausalLM(small.config.text_config).bfloat16()
    blind.model.load_state_dict(small.model.text_model.state_dict())
    blind.save_pretrained(folder / "blind")
    for name in TOKENIZER:
        copy(Path(bench.model, name), folder / "seeing" / name)
        copy(Path(bench.model, name), folder / "blind" / name)
    processor = json.loads(Path(bench.model, PROCESSOR).read_text(encoding="utf-8"))
    edge = {"longest_edge": SIDE}
    processor["image_processor"] |= {"size": edge, "max_image_size": edge}
    (folder / "seeing" / PROCESSOR).write_text(json.dumps(processor), encoding="utf-8")
    return folder / "seeing", folder / "blind"


async def run(bench: PicturesBench, folder: Path) -> list[PictureFigure]:
    """Measure, with folders written below `folder`."""
    seeing, blind = make_folders(bench, folder)
    async with _running(seeing) as cluster:
        gaps = await cluster.gaps(bench)
        encoded = await cluster.encodings(bench.num_turns)
        rss = cluster.decode_mib()
    async with _running(blind) as cluster:
        await cluster.gaps(replace(bench, num_rounds=1, pictures_per_minute=0))
        blind_rss = cluster.decode_mib()
    return [
        _figure("token gap p99, ms", *gaps),
        _figure("memory of the decode node, MiB", blind_rss, rss),
        _figure(f"encodings of a picture in {bench.num_turns} turns", 1, encoded),
    ]


def _figure(what: str, without: float, with_pictures: float) -> PictureFigure:
    ratio = round(with_pictures / without, 2)
    return PictureFigure(what, round(without, 1), round(with_pictures, 1), ratio)


class PicturesCluster:
    """A running cluster, with what is measured of it."""

    def __init__(self, cluster: LocalCluster, client: AsyncClient, metrics: dict[int, str]) -> None:
        self._cluster = cluster
        self._client = client
        self._metrics = metrics
        self._seeds: Iterator[int] = iter(range(1 << 30))

    async def gaps(self, bench: PicturesBench) -> tuple[float, float]:
        """Return the p99 of token gaps in ms without and with pictures: medians of rounds."""
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(bench.num_rounds):
            for gaps, per_minute in zip(found, (0.0, bench.pictures_per_minute), strict=True):
                gaps.append(await self._window(bench, per_minute))
        return statistics.median(found[0]), statistics.median(found[1])

    async def _window(self, bench: PicturesBench, per_minute: float) -> float:
        end_s, gaps = time.monotonic() + bench.window_s, list[float]()
        async with asyncio.TaskGroup() as group:
            for _ in range(bench.num_streams):
                group.create_task(self._stream(end_s, gaps))
            if per_minute:
                group.create_task(self._send_pictures(end_s, 60 / per_minute))
        return float(np.percentile(gaps, PERCENTILE)) * 1e3

    async def _stream(self, end_s: float, gaps: list[float]) -> None:
        sampling = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True, temperature=0.0)
        while time.monotonic() < end_s:
            last_s: float | None = None
            async for chunk in self._client.stream(PROMPT, Generation(sampling)):
                now_s = time.monotonic()
                # The first decoded token waits for the KV.
                if last_s is not None and chunk.first_index > 1:
                    gaps.append(now_s - last_s)
                last_s = now_s

    async def _send_pictures(self, end_s: float, every_s: float) -> None:
        """Send new pictures, the first one after half of the time between two."""
        next_s = time.monotonic() + every_s / 2
        while next_s < end_s:
            await asyncio.sleep(max(next_s - time.monotonic(), 0))
            await self._ask([_turn(_picture(next(self._seeds)))])
            next_s += every_s

    async def encodings(self, num_turns: int) -> float:
        """Send a chat whose first message has a picture, turn by turn, and count encodings."""
        before = (await self._scrape(self._cluster.prefills[0])).total(names.PICTURES, "encoded")
        messages = [_turn(_picture(next(self._seeds)))]
        for _ in range(num_turns):
            answer = await self._ask(messages)
            messages += [{"role": "assistant", "content": answer}, _turn()]
        after = (await self._scrape(self._cluster.prefills[0])).total(names.PICTURES, "encoded")
        return after - before

    async def _ask(self, messages: Sequence[dict[str, Any]]) -> str:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        return (await self._client.generate(messages, Generation(sampling))).text

    async def _scrape(self, child: Child) -> Scrape:
        return await asyncio.to_thread(scrape, self._metrics[child.process.pid])

    def decode_mib(self) -> float:
        return resident_bytes(self._cluster.decodes[0].process.pid) / MIB


@asynccontextmanager
async def _running(model: Path) -> AsyncIterator[PicturesCluster]:
    metrics: dict[int, str] = {}

    def note_metrics(child: Child, line: str) -> None:
        found = METRICS_AT.search(line)
        if found is not None:
            metrics[child.process.pid] = found[1]

    quiet = ("--trace-dir", "off", "--metrics-port", "0")
    options = ClusterOptions(
        str(model),
        node_arguments=("--kv-cache-memory=32MiB", "--threads=1", *quiet),
        router_arguments=quiet,
        on_line=note_metrics,
    )
    cluster = LocalCluster(options)
    await asyncio.to_thread(cluster.__enter__)
    try:
        async with AsyncClient(cluster.address) as client:
            yield PicturesCluster(cluster, client, metrics)
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


def _turn(*images: bytes) -> dict[str, Any]:
    return {"role": "user", "content": QUESTION, "images": list(images)}


def _picture(seed: int) -> bytes:
    """Return a picture that no other seed has."""
    coarse = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(coarse).resize((SIDE, SIDE)).save(file, "PNG")
    return file.getvalue()
