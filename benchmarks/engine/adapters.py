"""Adapter benchmark: decode steps with and without adapters, alternately; switching and loading.

One process, no servers, random adapters of all places. Prompts are cached, so that after a first
run all steps decode. Steps are measured in CPU time of the engine's thread, which computes all of
them with `--threads 1`: other load on the machine then distorts them less than wall time. Loading
is measured in wall time, as its thread takes turns with the engine's.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS, PeftFolder
from baton.core.ids import AdapterRef, RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.targets import find_targets
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import load_runner
from baton.engine.scheduler.config import SchedulerConfig

STD = 0.02


@dataclass(frozen=True, slots=True)
class AdapterBench:
    """Settings of the benchmark."""

    model: str
    dtype: str = "auto"
    quantize: str = "none"
    num_threads: int | None = 1
    batch: int = 32
    num_adapters: int = 8
    rank: int = 16
    num_prompt_tokens: int = 33
    num_steps: int = 8  # of a run that count, after one that admits its requests
    num_runs: int = 7


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """Medians. Times of the engine are its thread's CPU time."""

    batch: int
    adapters: int
    rank: int
    quantize: str
    step_ms: float  # without adapters
    adapted_step_ms: float
    ratio: float  # of the rates: with adapters to without; median by pair of runs
    switch_ms: float  # by which the adapters of a new batch lengthen its first step


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Reading an adapter from disk on another thread, in wall time."""

    adapter_mib: float
    load_ms: float
    longest_step_ms: float  # of other requests while it is read
    usual_longest_ms: float  # as many steps without


@dataclass(slots=True)
class _Engine:
    core: EngineCore
    table: AdapterTable
    adapter_ids: list[str]
    folders: list[Path]
    prompts: list[tuple[int, ...]]
    num_requests: int = 0


class _Asked(NamedTuple):
    prompt: tuple[int, ...]
    adapter_id: str


class _Run(NamedTuple):
    first_s: float  # of the step that admits the requests
    step_s: float  # median of the others


def run(bench: AdapterBench, on_run: Callable[[int, int], None]) -> tuple[AdapterCost, LoadCost]:
    """Run the benchmark; `on_run` is called with the number of runs that are done, and of all."""
    with _open(bench) as engine:
        plain = [_Asked(prompt, "") for prompt in engine.prompts]
        adapted = [
            _Asked(prompt, engine.adapter_ids[number % bench.num_adapters])
            for number, prompt in enumerate(engine.prompts)
        ]
        for asked in (plain, adapted):
            _add(engine, asked, num_tokens=1)  # computes the prompts
            _run_to_end(engine)
        without, having = [], []
        for done in range(bench.num_runs):
            without.append(_answer(bench, engine, plain))
            # In another order, so that the first step prepares the adapters of its batch.
            first = 1 + done % (bench.batch - 1)
            having.append(_answer(bench, engine, adapted[first:] + adapted[:first]))
            on_run(done + 1, bench.num_runs)
        return _cost(bench, without, having), _load_cost(bench, engine)


@contextmanager
def _open(bench: AdapterBench) -> Iterator[_Engine]:
    with ExitStack() as stack:
        config = RunnerConfig(
            bench.model,
            dtype=bench.dtype,
            quantize=bench.quantize,
            num_threads=bench.num_threads,
            kv_cache_share=0.05,
            max_num_seqs=bench.batch,
            max_loras=bench.num_adapters,
            max_lora_rank=bench.rank,
        )
        runner = stack.enter_context(load_runner(config))
        core = build_engine(runner, EngineOptions(SchedulerConfig(max_num_seqs=bench.batch)))
        parent = Path(stack.enter_context(TemporaryDirectory()))
        folders = [parent / str(seed) for seed in range(bench.num_adapters)]
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(
            3, runner.info.vocab_size, (bench.batch, bench.num_prompt_tokens), generator=generator
        )
        assert runner.adapters is not None
        engine = _Engine(core, runner.adapters, [], folders, [*map(tuple, prompts.tolist())])
        for seed, folder in enumerate(folders):
            write_random_adapter(bench.model, folder, bench.rank, seed)
            engine.adapter_ids.append(_load(engine, folder))
        yield engine


def write_random_adapter(model: str, folder: Path, rank: int, seed: int) -> None:
    """Write a random adapter of all matrices that adapters of this model can change."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    targets = find_targets(read_model_config(open_checkpoint(model)))
    for (layer, name), target in targets.items():
        if "[" in name:  # of an expert in a stacked parameter
            continue
        module = f"base_model.model.model.layers.{layer}.{name}"
        for side, shape in (("A", (rank, target.num_columns)), ("B", (target.num_rows, rank))):
            matrix = torch.randn(shape, generator=generator) * STD
            tensors[f"{module}.lora_{side}.weight"] = matrix.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def _load(engine: _Engine, folder: Path) -> str:
    files = PeftFolder(folder)
    adapter_id = files.digest()
    engine.table.add(adapter_id, engine.table.load(files))
    engine.core.scheduler.adapters.add(adapter_id)
    return adapter_id


def _answer(bench: AdapterBench, engine: _Engine, asked: Sequence[_Asked]) -> _Run:
    """Decode a batch, whose prompts are cached but for a token."""
    _add(engine, asked, num_tokens=2 + bench.num_steps)
    first_s = _step(engine)
    _step(engine)
    found = _Run(first_s, statistics.median(_step(engine) for _ in range(bench.num_steps)))
    _run_to_end(engine)
    return found


def _add(engine: _Engine, asked: Sequence[_Asked], num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for prompt, adapter in asked:
        engine.num_requests += 1
        name, used = RequestId(str(engine.num_requests)), AdapterRef(adapter, adapter)
        engine.core.scheduler.add(EngineRequest(name, prompt, sampling, 0, adapter=used))


def _run_to_end(engine: _Engine) -> None:
    while engine.core.scheduler.has_work:
        engine.core.step()


def _step(engine: _Engine) -> float:
    began_s = thread_time()
    engine.core.step()
    return thread_time() - began_s


def _cost(bench: AdapterBench, without: Sequence[_Run], having: Sequence[_Run]) -> AdapterCost:
    pairs = [*zip(without, having, strict=True)]
    switches = [
        (adapted.first_s - plain.first_s) - (adapted.step_s - plain.step_s)
        for plain, adapted in pairs
    ]
    return AdapterCost(
        bench.batch,
        bench.num_adapters,
        bench.rank,
        bench.quantize,
        1e3 * statistics.median(each.step_s for each in without),
        1e3 * statistics.median(each.step_s for each in having),
        statistics.median(plain.step_s / adapted.step_s for plain, adapted in pairs),
        1e3 * statistics.median(switches),
    )


def _load_cost(bench: AdapterBench, engine: _Engine) -> LoadCost:
    """Measure single requests' steps, which are the shortest, while adapters are read."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    loads: list[float] = []
    for is_loading in (False, True) * bench.num_runs:
        _add(engine, [_Asked(engine.prompts[0], "")], num_tokens=2 + bench.num_steps)
        _step(engine)
        may_begin, ended = threading.Event(), threading.Event()
        thread = threading.Thread(target=_time_load, args=(bench, engine, loads, may_begin, ended))
        if is_loading:
            thread.start()
        while engine.core.scheduler.has_work:
            counts = not ended.is_set()  # the first step always does, however short the load is
            may_begin.set()
            began_s = perf_counter()
            engine.core.step()
            if counts:
                steps[is_loading].append(perf_counter() - began_s)
        if is_loading:
            thread.join()
    files = PeftFolder(engine.folders[0])
    return LoadCost(
        engine.table.load(files).num_bytes / (1 << 20),
        1e3 * statistics.median(loads),
        1e3 * max(steps[True]),
        1e3 * max(steps[False]),
    )


def _time_load(
    bench: AdapterBench,
    engine: _Engine,
    loads: list[float],
    may_begin: threading.Event,
    ended: threading.Event,
) -> None:
    may_begin.wait()
    began_s = perf_counter()
    folder = engine.folders[len(loads) % bench.num_adapters]
    _load(engine, folder)
    loads.append(perf_counter() - began_s)
    ended.set()
