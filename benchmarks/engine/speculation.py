"""Speculation benchmark: source code continued alternately with and without speculation.

One process, no servers. The prompts are beginnings of source files. Both engines must generate the
same tokens; otherwise the figures would not be comparable.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from baton import engine
from baton.checkpoint.checkpoint import Checkpoint
from baton.core.ids import RequestId
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.spec_decode.config import Speculation

NUM_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class SpeculationBench:
    """Settings of the benchmark."""

    model: str
    speculation: Speculation
    dtype: str = "auto"
    num_threads: int | None = None
    temperatures: Sequence[float] = (0.0, 0.2, 0.8)
    batch_sizes: Sequence[int] = (1, 4)
    num_prompt_tokens: int = 300
    num_tokens: int = 200
    num_runs: int = 5


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Medians over the runs. Other load on the machine distorts CPU time less than rates."""

    temperature: float
    batch: int
    tokens_per_s: float
    tokens_per_s_with: float
    speed_up: float  # median ratio of times, by run
    cpu_speed_up: float  # median ratio of process CPU times, by run
    accepted: float  # share of the proposed tokens
    tokens_per_step: float  # of a request, with speculation
    same: bool  # all tokens equal in all runs


@dataclass(frozen=True, slots=True)
class _Run:
    answers: list[list[int]]
    took_s: float
    cpu_s: float
    num_proposed: int
    num_accepted: int


def run(bench: SpeculationBench, on_figure: Callable[[SpeedUp], None]) -> list[SpeedUp]:
    """Run the benchmark; `on_figure` is called with each result."""
    with _engines(bench) as (plain, speculating, prompts):
        figures = []
        for temperature in bench.temperatures:
            for batch in bench.batch_sizes:
                figures.append(_compared(bench, plain, speculating, prompts, temperature, batch))
                on_figure(figures[-1])
    return figures


@contextmanager
def _engines(
    bench: SpeculationBench,
) -> Iterator[tuple[EngineCore, EngineCore, list[tuple[int, ...]]]]:
    with ExitStack() as stack:
        engines = []
        for speculation in (None, bench.speculation):
            config = RunnerConfig(
                bench.model,
                dtype=bench.dtype,
                num_threads=bench.num_threads,
                kv_cache_share=0.05,
                max_num_seqs=max(bench.batch_sizes),
                speculation=speculation,
            )
            runner = stack.enter_context(load_runner(config))
            options = EngineOptions(SchedulerConfig(max_num_seqs=max(bench.batch_sizes)))
            engines.append(build_engine(runner, options))
        yield engines[0], engines[1], _prompts(runner.info.checkpoint, bench.num_prompt_tokens)


def _prompts(checkpoint: Checkpoint, num_tokens: int) -> list[tuple[int, ...]]:
    """Return the beginnings of the engine's largest source files as prompts."""
    tokenizer = checkpoint.load_tokenizer()
    sources = sorted(
        Path(engine.__file__).parent.glob("*.py"), key=lambda path: path.stat().st_size
    )
    texts = [path.read_text(encoding="utf-8") for path in sources[-NUM_PROMPTS:]]
    return [tuple(tokenizer.encode(text)[:num_tokens]) for text in texts]


def _compared(
    bench: SpeculationBench,
    plain: EngineCore,
    speculating: EngineCore,
    prompts: Sequence[tuple[int, ...]],
    temperature: float,
    batch: int,
) -> SpeedUp:
    sampling = SamplingParams(max_tokens=bench.num_tokens, temperature=temperature, ignore_eos=True)
    _answer(plain, prompts[:1], sampling, 1)  # the first is slower: memory is touched
    _answer(speculating, prompts[:1], sampling, 1)
    without, having = [], []
    for _ in range(bench.num_runs):
        without.append(_answer(plain, prompts, sampling, batch))
        having.append(_answer(speculating, prompts, sampling, batch))
    pairs = list(zip(without, having, strict=True))
    num_tokens = len(prompts) * bench.num_tokens
    num_proposed = sum(one.num_proposed for one in having)
    num_accepted = sum(one.num_accepted for one in having)
    return SpeedUp(
        temperature,
        batch,
        statistics.median(num_tokens / one.took_s for one in without),
        statistics.median(num_tokens / one.took_s for one in having),
        statistics.median(one.took_s / other.took_s for one, other in pairs),
        statistics.median(one.cpu_s / other.cpu_s for one, other in pairs),
        num_accepted / num_proposed if num_proposed else 0.0,
        1 / (1 - num_accepted / (bench.num_runs * num_tokens)),
        all(one.answers == other.answers for one, other in pairs),
    )


def _answer(
    engine_core: EngineCore,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    batch: int,
) -> _Run:
    """Continue all prompts in batches. Prefixes are cached, so that decoding dominates."""
    answers: dict[RequestId, list[int]] = {}
    stats = engine_core.scheduler.stats()
    began_s, began_cpu_s = perf_counter(), process_time()
    for first in range(0, len(prompts), batch):
        for place in range(first, min(first + batch, len(prompts))):
            name = RequestId(str(place))
            answers[name] = []
            engine_core.scheduler.add(EngineRequest(name, prompts[place], sampling, seed=place))
        while engine_core.scheduler.has_work:
            for output in _step(engine_core):
                answers[output.request_id] += output.token_ids
    ended = engine_core.scheduler.stats()
    return _Run(
        list(answers.values()),
        perf_counter() - began_s,
        process_time() - began_cpu_s,
        ended.total_proposed_tokens - stats.total_proposed_tokens,
        ended.total_accepted_tokens - stats.total_accepted_tokens,
    )


def _step(engine_core: EngineCore) -> list[Output]:
    return engine_core.step()
