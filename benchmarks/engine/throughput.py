"""Engine benchmark: prefill rate by prompt length, decode rate by batch size.

One process, no servers. Prompts are random token ids, so that no prefix cache hits. Each rate also
comes as a share of the roofline: the rate that memory bandwidth and arithmetic, measured in the
same round, would allow.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.kernels.build import KernelsUnavailable
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.open_runner import open_runner
from baton.engine.scheduler.config import SchedulerConfig
from benchmarks.engine.limits import LimitMeter
from benchmarks.engine.roofline import Work, batch_of, expect_experts, prompt_of, work_of
from benchmarks.engine.routing import RoutingMeter
from benchmarks.engine.step_cost import Spent, StepCost, StepMeter, step_cost

Made = tuple[str, str, str]  # kernels, quantization and dtype of activations

NUM_WARM_UP_STEPS = 2
DECODE_PROMPT_LEN = 32


@dataclass(frozen=True, slots=True)
class EngineBench:
    model: str
    dtype: str = "auto"
    num_threads: int | None = None
    kernels: Sequence[str] = ("auto",)
    quantize: Sequence[str] = ("none",)
    prompt_lens: Sequence[int] = (128, 512)
    batch_sizes: Sequence[int] = (1, 4, 16, 32)
    num_decode_steps: int = 16
    num_runs: int = 5
    kv_cache_dtype: str = "auto"
    activation_dtypes: Sequence[str] = ("auto",)
    device: str = "cpu"
    decode_prompt_len: int = DECODE_PROMPT_LEN
    num_ranks: int = 1  # processes of `engine_meter`


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second over the runs of one setting."""

    kernels: str
    quantize: str
    activation_dtype: str
    phase: str  # prefill or decode
    size: int  # tokens of the prompt, or requests in the batch
    median_tokens_per_s: float
    worst_tokens_per_s: float
    best_tokens_per_s: float
    share_of_limit: float | None  # median of the rounds; None without native kernels, or on a GPU


@dataclass(frozen=True, slots=True)
class EngineFigures:
    rates: Sequence[Rate]
    steps: Sequence[StepCost]  # of decoding, by batch size


def run(bench: EngineBench, on_rate: Callable[[Rate], None]) -> EngineFigures:
    """Run the benchmark, which takes minutes; `on_rate` is called with each rate."""
    with ExitStack() as stack:
        meters = {
            made: _Meter(
                stack.enter_context(load_runner(_config(bench, *made))), bench, quantize=made[1]
            )
            for made in itertools.product(bench.kernels, bench.quantize, bench.activation_dtypes)
        }
        limits = _limit_meter() if bench.device == "cpu" else None
        rates = []
        for prompt_len in bench.prompt_lens:
            rates += _rates("prefill", prompt_len, bench.num_runs, meters, _Meter.prefill, limits)
            on_rate(rates[-1])
        for batch_size in bench.batch_sizes:
            rates += _rates("decode", batch_size, bench.num_runs, meters, _Meter.decode, limits)
            on_rate(rates[-1])
        # Last, since the clocks cannot be removed from the engine.
        steps = [
            step_cost(*made, batch_size, spent)
            for made, meter in meters.items()
            for batch_size, spent in meter.steps().items()
        ]
    return EngineFigures(rates, steps)


@contextmanager
def engine_meter(bench: EngineBench) -> Iterator[_Meter]:
    """Yield a meter with the first of the requested settings."""
    made = bench.kernels[0], bench.quantize[0], bench.activation_dtypes[0]
    with open_runner(_config(bench, *made)) as runner:
        assert isinstance(runner, TorchRunner)
        yield _Meter(runner, bench, bench.quantize[0])


def _config(bench: EngineBench, kernels: str, quantize: str, activation_dtype: str) -> RunnerConfig:
    return RunnerConfig(
        model=bench.model,
        dtype=bench.dtype,
        device=bench.device,
        num_threads=bench.num_threads,
        tensor_parallel_size=bench.num_ranks,
        max_num_seqs=max(bench.batch_sizes),
        kv_cache_share=0.1,
        max_model_len=longest(bench),
        max_num_batched_tokens=_max_step(bench),
        kernels=kernels,
        quantize=quantize,
        activation_dtype=activation_dtype,
        kv_cache_dtype=bench.kv_cache_dtype,
    )


def longest(bench: EngineBench) -> int:
    decoding = bench.decode_prompt_len + NUM_WARM_UP_STEPS + bench.num_decode_steps
    return max(*bench.prompt_lens, decoding) + 2


def context_of(bench: EngineBench) -> int:
    """Return the context of a sequence in the middle of a measured decode."""
    return bench.decode_prompt_len + NUM_WARM_UP_STEPS + bench.num_decode_steps // 2


def _max_step(bench: EngineBench) -> int:
    """Return the tokens of a step: one prompt, or those of the largest batch."""
    return max(2048, *bench.prompt_lens, bench.decode_prompt_len * max(bench.batch_sizes))


def _limit_meter() -> LimitMeter | None:
    try:
        return LimitMeter(torch.get_num_threads())
    except KernelsUnavailable:
        return None


def _rates(
    phase: str,
    size: int,
    num_runs: int,
    meters: Mapping[Made, _Meter],
    measure: Callable[[_Meter, int], float],
    limits: LimitMeter | None,
) -> list[Rate]:
    """Measure all settings alternately, so that machine noise affects them alike."""
    for meter in meters.values():
        with meter.routing.count():
            measure(meter, size)  # warm-up: page faults, thread start
    rounds: list[list[float]] = []
    shares: list[list[float]] = []
    for _ in range(num_runs):
        rates = [measure(meter, size) for meter in meters.values()]
        rounds.append(rates)
        if limits is not None:
            roofline = limits.bytes_per_s(), limits.flops_per_s()
            best = [meter.limit(phase, size, *roofline) for meter in meters.values()]
            shares.append([rate / limit for rate, limit in zip(rates, best, strict=True)])
    return [
        Rate(
            *made,
            phase,
            size,
            statistics.median(each[at] for each in rounds),
            min(each[at] for each in rounds),
            max(each[at] for each in rounds),
            statistics.median(each[at] for each in shares) if shares else None,
        )
        for at, made in enumerate(meters)
    ]


class _Meter:
    def __init__(self, runner: TorchRunner, bench: EngineBench, quantize: str) -> None:
        self._bench = bench
        self._work: Work = work_of(runner.info.checkpoint, quantize, bench.kv_cache_dtype)
        self.routing = RoutingMeter(expect_experts(self._work.moe))
        self._vocab_size = runner.info.vocab_size
        self._random = random.Random(0)
        scheduling = SchedulerConfig(
            max_num_seqs=max(bench.batch_sizes),
            max_num_batched_tokens=_max_step(bench),
        )
        self._runner = runner
        self._engine = build_engine(runner, EngineOptions(scheduling, enable_prefix_caching=False))

    def prefill(self, prompt_len: int) -> float:
        """Return the tokens per second of one prompt, including sampling of the first token."""
        self._add(prompt_len, max_tokens=1)
        began_s = perf_counter()
        _run_dry(self._engine)
        return prompt_len / (perf_counter() - began_s)

    def decode(self, batch_size: int) -> float:
        """Return the tokens per second of a steady batch."""
        num_steps = self._bench.num_decode_steps
        self._begin_batch(batch_size)
        began_s = perf_counter()
        for _ in range(num_steps):
            self._engine.step()
        elapsed_s = perf_counter() - began_s
        _run_dry(self._engine)
        return batch_size * num_steps / elapsed_s

    def steps(self) -> dict[int, list[Spent]]:
        """Return by batch size the CPU time of each decode step, by phase."""
        meter = StepMeter(self._engine, self._runner)
        spent: dict[int, list[Spent]] = {size: [] for size in self._bench.batch_sizes}
        for batch_size, _ in itertools.product(spent, range(self._bench.num_runs)):
            self._begin_batch(batch_size)
            meter.step()  # resets the clocks
            spent[batch_size] += [meter.step() for _ in range(self._bench.num_decode_steps)]
            _run_dry(self._engine)
        return spent

    def limit(self, phase: str, size: int, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the roofline in tokens per second: a step only reads and multiplies."""
        is_prompt = phase == "prefill"
        load = prompt_of(size) if is_prompt else batch_of(size, context_of(self._bench))
        seconds = self._work.seconds(load, self.routing.num_experts, bytes_per_s, flops_per_s)
        return size / seconds

    def _begin_batch(self, batch_size: int) -> None:
        """Start a batch; all following steps decode."""
        max_tokens = NUM_WARM_UP_STEPS + self._bench.num_decode_steps + 2
        for _ in range(batch_size):
            self._add(self._bench.decode_prompt_len, max_tokens)
        for _ in range(NUM_WARM_UP_STEPS):
            self._engine.step()

    def _add(self, prompt_len: int, max_tokens: int) -> None:
        prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(prompt_len))
        name = RequestId(f"{self._random.getrandbits(64):x}")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.scheduler.add(EngineRequest(name, prompt, sampling, seed=0))


def _run_dry(engine: EngineCore) -> None:
    while engine.scheduler.has_work:
        engine.step()
