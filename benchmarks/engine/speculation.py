"""Speculation benchmark: texts continued alternately with and without speculation.

One process, no servers. The prompts are beginnings of source files. Both engines must generate the
same tokens; otherwise the figures would not be comparable. Only decoding is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time

from baton import engine
from baton.checkpoint.tokenizer import Tokenizer
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
NUM_EDITED = 2  # sources, of which there are several versions
# So few different tokens that matches are frequent, and so many that hardly a draft is right.
NUM_NOISE_TOKENS = 24
NOISE_TEMPERATURE = 50.0


@dataclass(frozen=True, slots=True)
class SpeculationBench:
    """Settings of the benchmark."""

    model: str
    speculation: Speculation
    speculative_model: str = ""
    dtype: str = "auto"
    num_threads: int | None = None
    texts: Sequence[str] = ("source",)  # of TEXTS
    temperatures: Sequence[float] = (0.0, 0.2, 0.8)
    batch_sizes: Sequence[int] = (1, 4)
    num_prompt_tokens: int = 300
    num_tokens: int = 200
    num_runs: int = 5


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Medians over the runs. Other load on the machine distorts CPU time less than rates."""

    text: str
    temperature: float
    batch: int
    tokens_per_s: float
    tokens_per_s_with: float
    speed_up: float  # median ratio of times, by run
    cpu_speed_up: float  # median ratio of process CPU times, by run
    accepted: float  # share of the proposed tokens
    tokens_per_step: float  # of a request, with speculation
    same: bool  # all tokens equal in all runs


@dataclass(slots=True)
class _Run:
    """Answers of one engine to all requests."""

    answers: list[list[int]] = field(default_factory=list)
    took_s: float = 0.0
    cpu_s: float = 0.0
    num_proposed: int = 0
    num_accepted: int = 0


_Answers = dict[RequestId, list[int]]


# --- texts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts, and what is requested with them."""

    tokenizer: Tokenizer
    sources: Sequence[tuple[int, ...]]
    sampling: SamplingParams


def _sources(prompts: _Prompts, run: int) -> list[EngineRequest]:
    """Return sources to continue. No run sees the answers of another one."""
    return [
        EngineRequest(
            RequestId(str(place)), source, prompts.sampling, seed=place, cache_salt=f"run {run}"
        )
        for place, source in enumerate(prompts.sources)
    ]


def _edits(prompts: _Prompts, run: int) -> list[EngineRequest]:
    """Return versions of a few sources, which end differently."""
    requests = []
    for number, request in enumerate(_sources(prompts, run)):
        ending = prompts.tokenizer.encode(f"  # {run}.{number}\n", add_special_tokens=False)
        source = prompts.sources[number % NUM_EDITED]
        version = replace(request, prompt_token_ids=(*source, *ending))
        requests.append(replace(version, seed=number % NUM_EDITED, cache_salt=""))
    return requests


def _noise(prompts: _Prompts, run: int) -> list[EngineRequest]:
    """Return requests for random tokens."""
    allowed = tuple(dict.fromkeys(prompts.sources[0]))[:NUM_NOISE_TOKENS]
    sampling = replace(prompts.sampling, temperature=NOISE_TEMPERATURE, allowed_token_ids=allowed)
    return _sources(replace(prompts, sampling=sampling), run)


# Requests of a run, by its number. To those of `prediction`, the answer with one token changed is
# added.
TEXTS: Mapping[str, Callable[[_Prompts, int], list[EngineRequest]]] = {
    "source": _sources,
    "prediction": _sources,
    "edits": _edits,
    "noise": _noise,
}


def _with_prediction(
    request: EngineRequest, answer: Sequence[int], others: Sequence[int]
) -> EngineRequest:
    middle = len(answer) // 2
    other = next(token_id for token_id in others if token_id != answer[middle])
    predicted = (*answer[:middle], other, *answer[middle + 1 :])
    return replace(request, predicted_token_ids=predicted)


# --- runs -----------------------------------------------------------------------------


def run(bench: SpeculationBench, on_figure: Callable[[SpeedUp], None]) -> list[SpeedUp]:
    """Run the benchmark; `on_figure` is called with each result."""
    figures = []
    with _engine(bench, None) as (plain, tokenizer):
        sources = _beginnings(tokenizer, bench.num_prompt_tokens)
        for text in bench.texts:
            temperatures = (NOISE_TEMPERATURE,) if text == "noise" else bench.temperatures
            for temperature in temperatures:
                sampling = SamplingParams(
                    max_tokens=bench.num_tokens, temperature=temperature, ignore_eos=True
                )
                prompts = _Prompts(tokenizer, sources, sampling)
                for batch in bench.batch_sizes:
                    # A new one, which has learnt nothing from the texts before.
                    with _engine(bench, bench.speculation) as (speculating, _):
                        engines = plain, speculating
                        figures.append(_compared(bench, engines, text, prompts, batch))
                    on_figure(figures[-1])
    return figures


@contextmanager
def _engine(
    bench: SpeculationBench, speculation: Speculation | None
) -> Iterator[tuple[EngineCore, Tokenizer]]:
    config = RunnerConfig(
        bench.model,
        dtype=bench.dtype,
        num_threads=bench.num_threads,
        kv_cache_share=0.05,
        max_num_seqs=max(bench.batch_sizes),
        speculation=speculation,
        speculative_model="" if speculation is None else bench.speculative_model,
    )
    with load_runner(config) as runner:
        options = EngineOptions(SchedulerConfig(max_num_seqs=max(bench.batch_sizes)))
        yield build_engine(runner, options), runner.info.checkpoint.load_tokenizer()


def _beginnings(tokenizer: Tokenizer, num_tokens: int) -> list[tuple[int, ...]]:
    """Return the beginnings of the engine's largest source files."""
    files = sorted(Path(engine.__file__).parent.glob("*.py"), key=lambda path: path.stat().st_size)
    texts = [path.read_text(encoding="utf-8") for path in files[-NUM_PROMPTS:]]
    return [tuple(tokenizer.encode(text)[:num_tokens]) for text in texts]


def _compared(
    bench: SpeculationBench,
    engines: tuple[EngineCore, EngineCore],
    text: str,
    prompts: _Prompts,
    batch: int,
) -> SpeedUp:
    pairs = [
        _run_both(engines, text, TEXTS[text](prompts, number), batch)
        for number in range(bench.num_runs + 1)
    ][1:]  # the first is slower: memory is touched
    num_tokens = len(prompts.sources) * (bench.num_tokens - 1)  # without those of prefill
    num_proposed = sum(one.num_proposed for _, one in pairs)
    num_accepted = sum(one.num_accepted for _, one in pairs)
    return SpeedUp(
        text,
        NOISE_TEMPERATURE if text == "noise" else prompts.sampling.temperature,
        batch,
        statistics.median(num_tokens / one.took_s for one, _ in pairs),
        statistics.median(num_tokens / one.took_s for _, one in pairs),
        statistics.median(one.took_s / other.took_s for one, other in pairs),
        statistics.median(one.cpu_s / other.cpu_s for one, other in pairs),
        num_accepted / num_proposed if num_proposed else 0.0,
        1 / (1 - num_accepted / (bench.num_runs * num_tokens)),
        all(one.answers == other.answers for one, other in pairs),
    )


def _run_both(
    engines: tuple[EngineCore, EngineCore],
    text: str,
    requests: Sequence[EngineRequest],
    batch: int,
) -> tuple[_Run, _Run]:
    """Answer all requests in batches, each by one engine right after the other."""
    plain, speculating = _Run(), _Run()
    for first in range(0, len(requests), batch):
        together = requests[first : first + batch]
        answers = _answer(engines[0], together, plain)
        if text == "prediction":
            others = together[0].prompt_token_ids
            together = [
                _with_prediction(request, answers[request.request_id], others)
                for request in together
            ]
        _answer(engines[1], together, speculating)
    return plain, speculating


def _answer(core: EngineCore, requests: Sequence[EngineRequest], run: _Run) -> _Answers:
    """Answer requests together, and count them in the run."""
    answers: _Answers = {request.request_id: [] for request in requests}
    stats = core.scheduler.stats()
    for request in requests:
        core.scheduler.add(request)
    while not all(answers.values()):
        _step(core, answers)
    began_s, began_cpu_s = perf_counter(), process_time()
    while core.scheduler.has_work:
        _step(core, answers)
    run.took_s += perf_counter() - began_s
    run.cpu_s += process_time() - began_cpu_s
    ended = core.scheduler.stats()
    run.num_proposed += ended.total_proposed_tokens - stats.total_proposed_tokens
    run.num_accepted += ended.total_accepted_tokens - stats.total_accepted_tokens
    run.answers += answers.values()
    return answers


def _step(core: EngineCore, answers: _Answers) -> None:
    outputs: list[Output] = core.step()
    for output in outputs:
        answers[output.request_id] += output.token_ids
