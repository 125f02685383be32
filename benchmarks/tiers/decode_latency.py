"""Time of decode steps while tiers store and load other blocks at a steady rate, and without."""

from __future__ import annotations

import ctypes
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles
from threading import Event, Thread
from time import perf_counter

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.calls import fastest_copies
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.tiers.bandwidth import TierDriver
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import BlockMemory, CpuKvAccess
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.store_kinds import FILES
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node.kv.tiers import CopyPacing

PROMPT_LEN = 32
NUM_WARM_UP_STEPS = 8
HOST_MOVES = 8  # fit into host memory
MOVED_SHARE = 0.02  # of all blocks: stored and loaded at a time; no request uses them


@dataclass(frozen=True, slots=True)
class DecodeBench:
    model: str
    kv_cache_bytes: int
    gb_per_s: float
    num_streams: int
    num_steps: int
    num_rounds: int
    with_files: bool


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Medians over rounds. Each round decodes with idle tiers and with busy ones."""

    idle_p50_ms: float
    idle_p99_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    p50_ratio: float  # median of the ratios of a round
    p99_ratio: float
    moved_gb_per_s: float


def run(bench: DecodeBench) -> DecodeRow:
    with ExitStack() as stack:
        config = RunnerConfig(
            bench.model,
            kv_cache_bytes=bench.kv_cache_bytes,
            max_num_seqs=bench.num_streams,
            max_model_len=PROMPT_LEN + 2 * (NUM_WARM_UP_STEPS + bench.num_steps) + 2,
        )
        runner = stack.enter_context(load_runner(config))
        traffic = stack.enter_context(_traffic(runner, bench))
        meter = _Meter(runner, bench, traffic.pacing)
        rounds = [meter.round(traffic, busy_first=bool(n % 2)) for n in range(bench.num_rounds)]
    return _row(rounds, traffic.gb_per_s)


def _row(rounds: Sequence[tuple[list[float], list[float]]], gb_per_s: float) -> DecodeRow:
    idle, busy = ([each[half] for each in rounds] for half in (0, 1))
    pairs = list(zip(busy, idle, strict=True))
    return DecodeRow(
        idle_p50_ms=median(map(median, idle)) * 1e3,
        idle_p99_ms=median(map(_p99, idle)) * 1e3,
        busy_p50_ms=median(map(median, busy)) * 1e3,
        busy_p99_ms=median(map(_p99, busy)) * 1e3,
        p50_ratio=median(median(one) / median(other) for one, other in pairs),
        p99_ratio=median(_p99(one) / _p99(other) for one, other in pairs),
        moved_gb_per_s=gb_per_s,
    )


def _p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100)[-1]


class _Meter:
    def __init__(self, runner: TorchRunner, bench: DecodeBench, pacing: CopyPacing) -> None:
        self._bench = bench
        self._random = random.Random(0)
        self._vocab_size = runner.info.vocab_size
        scheduling = SchedulerConfig(max_num_seqs=bench.num_streams)
        options = EngineOptions(scheduling, enable_prefix_caching=False)
        self._engine = build_engine(runner, options, observers=[pacing])

    def round(self, traffic: _Traffic, *, busy_first: bool) -> tuple[list[float], list[float]]:
        """Return the times of steps next to idle and to busy tiers."""
        for _ in range(self._bench.num_streams):
            self._add()
        self._steps(NUM_WARM_UP_STEPS)
        times: dict[bool, list[float]] = {}
        for is_busy in (busy_first, not busy_first):
            with traffic.flowing(is_busy):
                times[is_busy] = self._steps(self._bench.num_steps)
        _run_dry(self._engine)
        return times[False], times[True]

    def _steps(self, num_steps: int) -> list[float]:
        times = []
        for _ in range(num_steps):
            began_s = perf_counter()
            self._engine.step()
            times.append(perf_counter() - began_s)
        return times

    def _add(self) -> None:
        prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(PROMPT_LEN))
        max_tokens = 2 * self._bench.num_steps + NUM_WARM_UP_STEPS + 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        name = RequestId(f"{self._random.getrandbits(64):x}")
        self._engine.scheduler.add(EngineRequest(name, prompt, sampling, seed=0))


def _run_dry(engine: EngineCore) -> None:
    while engine.scheduler.has_work:
        engine.step()


class _Traffic:
    """Stores and loads at a rate, on a thread of its own."""

    def __init__(
        self,
        tiers: TieredKv,
        woken: Event,
        block_ids: Sequence[int],
        block_bytes: int,
        gb_per_s: float,
    ):
        self.pacing = CopyPacing(tiers.pace)
        self._driver = TierDriver(tiers, woken)
        self._block_ids = block_ids
        self._num_bytes = 2 * len(block_ids) * block_bytes
        self._pace_s = self._num_bytes / (gb_per_s * 1e9)
        self._numbers = count()  # names of blocks
        self._num_moves = 0
        self._busy_s = 0.0

    @property
    def gb_per_s(self) -> float:
        return self._num_moves * self._num_bytes / self._busy_s / 1e9

    @contextmanager
    def flowing(self, is_busy: bool) -> Iterator[None]:
        if not is_busy:
            yield
            return
        stop, began_s = Event(), perf_counter()
        thread = Thread(target=self._move_until, args=(stop,))
        thread.start()
        yield
        stop.set()
        thread.join()
        self._busy_s += perf_counter() - began_s

    def touch_memory(self) -> None:
        """Use all host memory once: the first use of a page takes much longer than later ones."""
        for _ in range(HOST_MOVES):
            self._move()

    def _move(self) -> None:
        names = [next(self._numbers).to_bytes(16, "big") for _ in self._block_ids]
        self._driver.store(names, self._block_ids)
        self._driver.load(names, self._block_ids)

    def _move_until(self, stop: Event) -> None:
        while not stop.is_set():
            began_s = perf_counter()
            self._move()
            self._num_moves += 1
            stop.wait(max(0.0, began_s + self._pace_s - perf_counter()))


@contextmanager
def _traffic(runner: TorchRunner, bench: DecodeBench) -> Iterator[_Traffic]:
    kv = runner.kv_memory
    num_moved = max(1, int(kv.num_blocks * MOVED_SHARE))
    num_host = HOST_MOVES * num_moved
    owner = huge_page_memory(num_host * kv.block_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    host = HostTier(BlockMemory(address, num_host, kv.block_bytes), owner)
    with tempfile.TemporaryDirectory() as folder:
        limit = 4 * num_moved * (kv.block_bytes + 64)
        files = ((FILES, FileStore(folder, "bench", kv.block_bytes, limit)),)
        memory = BlockMemory(kv.address, kv.num_blocks, kv.block_bytes)
        copies, woken = CpuKvAccess(memory, fastest_copies(kv.block_bytes)), Event()
        with TieredKv(copies, host, files if bench.with_files else (), wake=woken.set) as tiers:
            block_ids = range(kv.num_blocks - num_moved, kv.num_blocks)
            traffic = _Traffic(tiers, woken, block_ids, kv.block_bytes, bench.gb_per_s)
            traffic.touch_memory()
            yield traffic
