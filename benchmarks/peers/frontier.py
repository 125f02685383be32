"""Goodput frontier: the highest rate at which each engine meets given latency limits.

Each engine gets the same requests at the same times, at increasing rates. The latencies of all
requests are kept, so one sweep serves every pair of limits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from baton.bench.figures import quantile
from baton.bench.load import Lengths, PlannedRequest, ServeLoad, plan, warm_up
from baton.core.errors import InvalidConfig
from benchmarks.peers.completions_api import (
    VOCAB_SIZE,
    CompletionsApi,
    EngineFailed,
    StreamedCompletion,
    detached_threads,
)
from benchmarks.peers.warm_engines import Start

MEAN, P99 = "mean", "p99"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Load, the same for each engine, and latency limits."""

    rates: Sequence[float] = (0.1, 0.2, 0.3, 0.4)  # requests per second, rising
    seconds: float = 90.0  # duration of the load at each rate
    prompt_tokens: int = 512
    answer_tokens: int = 64
    first_token_limits_s: Sequence[float] = (2.0, 4.0, 8.0)
    itl_limits_ms: Sequence[float] = (50, 75, 100, 150, 200, 300, 500, 1000)
    itl: str = MEAN  # statistic of an answer's gaps that is limited
    share: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        listed = (self.rates, self.first_token_limits_s, self.itl_limits_ms)
        if not all(listed) or min(map(min, listed)) <= 0:
            raise InvalidConfig("rates and limits must be above 0, with at least one of each")
        if self.answer_tokens < 2 or not 0 < self.share <= 1:
            raise InvalidConfig(
                "answers need at least two tokens, and the share must be above 0 and at most 1"
            )
        if self.itl not in (MEAN, P99):
            raise InvalidConfig(f"itl is {self.itl!r}; it must be {MEAN} or {P99}")

    def load(self, rate: float) -> ServeLoad:
        return ServeLoad(
            rate=rate,
            duration_s=self.seconds,
            prompt=Lengths("", (self.prompt_tokens,)),
            output=Lengths("", (self.answer_tokens,)),
            num_warm_up=1,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class AnswerLatencies:
    """One answer as seen by its client. The first token counts from the planned send time."""

    first_token_s: float
    itl_mean_ms: float
    itl_p99_ms: float

    def itl_ms(self, kind: str) -> float:
        return self.itl_mean_ms if kind == MEAN else self.itl_p99_ms


@dataclass(frozen=True, slots=True)
class RateRun:
    """Results of one engine at one rate."""

    engine: str
    rate: float
    answers: Sequence[AnswerLatencies]
    errors: Sequence[str]

    def kept(self, first_token_s: float, itl_ms: float, kind: str) -> float:
        """Return the share of all requests that met both limits."""
        good = [
            one
            for one in self.answers
            if one.first_token_s <= first_token_s and one.itl_ms(kind) <= itl_ms
        ]
        return len(good) / (len(self.answers) + len(self.errors))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Highest measured rate at which enough requests met both limits; 0 if none."""

    engine: str
    first_token_limit_s: float
    itl_limit_ms: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Sweep with its runs, or those before an interruption."""

    bench: Sweep
    runs: Sequence[RateRun]
    is_whole: bool


def run(bench: Sweep, engines: Mapping[str, Start], on_run: Callable[[RateRun], None]) -> None:
    """Run the sweep; `on_run` is called with each run. Raises EngineFailed."""
    for name, start in engines.items():
        with start() as api:
            for one in _swept(bench, name, api):
                on_run(one)
                if _is_overloaded(bench, one):
                    break  # higher rates would miss the limits, too


def _swept(bench: Sweep, name: str, api: CompletionsApi) -> Iterator[RateRun]:
    model = api.model().name
    for request in warm_up(bench.load(bench.rates[0]), VOCAB_SIZE):
        api.stream(model, _ids(request), request.max_tokens)
    for rate in sorted(bench.rates):
        outcomes = _sent(api, model, plan(bench.load(rate), VOCAB_SIZE))
        answers = [one for one in outcomes if isinstance(one, AnswerLatencies)]
        errors = [one for one in outcomes if isinstance(one, str)]
        if not answers:
            raise EngineFailed(f"{name} answered no request: {errors[0]}")
        yield RateRun(name, rate, answers, errors)


def _is_overloaded(bench: Sweep, one: RateRun) -> bool:
    limits = max(bench.first_token_limits_s), max(bench.itl_limits_ms)
    return one.kept(*limits, bench.itl) < bench.share


def _sent(
    api: CompletionsApi, model: str, requests: Sequence[PlannedRequest]
) -> list[AnswerLatencies | str]:
    """Send the requests open-loop at their times."""
    began_s = time.monotonic()
    with detached_threads(len(requests)) as threads:
        sent: list[Future[AnswerLatencies | str]] = []
        for request in requests:
            due_s = began_s + request.at_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            sent.append(threads.submit(_send, api, model, request, due_s))
        return [one.result() for one in sent]


def _send(
    api: CompletionsApi, model: str, request: PlannedRequest, due_s: float
) -> AnswerLatencies | str:
    """Return the latencies of a request, or its error."""
    try:
        return seen(api.stream(model, _ids(request), request.max_tokens), due_s)
    except EngineFailed as error:
        return str(error)


def _ids(request: PlannedRequest) -> Sequence[int]:
    return [int(token_id) for token_id in request.prompt]


def seen(streamed: StreamedCompletion, due_s: float) -> AnswerLatencies:
    """Return the latencies. Gaps are between messages; their mean is per token."""
    times_s = [at_s for at_s, _ in streamed.arrivals]
    gaps_ms = [(later_s - earlier_s) * 1e3 for earlier_s, later_s in pairwise(times_s)]
    num_later = streamed.num_tokens - streamed.arrivals[0][1]
    return AnswerLatencies(
        first_token_s=times_s[0] - due_s,
        itl_mean_ms=sum(gaps_ms) / num_later if num_later else 0.0,
        itl_p99_ms=quantile(gaps_ms, 0.99) if gaps_ms else 0.0,
    )


def frontier(bench: Sweep, runs: Sequence[RateRun]) -> list[Goodput]:
    """Return the goodput for each engine and each pair of limits."""
    names = dict.fromkeys(one.engine for one in runs)
    limits = product(bench.first_token_limits_s, bench.itl_limits_ms)
    return [
        Goodput(name, *pair, _highest(bench, [one for one in runs if one.engine == name], *pair))
        for pair in limits
        for name in names
    ]


def _highest(bench: Sweep, runs: Sequence[RateRun], first_token_s: float, itl_ms: float) -> float:
    kept = (one.rate for one in runs if one.kept(first_token_s, itl_ms, bench.itl) >= bench.share)
    return max(kept, default=0.0)


def read_sweep(path: Path) -> SweepResult:
    """Read a file of `--json`. Raises InvalidConfig."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        runs = [
            RateRun(**{**one, "answers": [AnswerLatencies(**answer) for answer in one["answers"]]})
            for one in values["runs"]
        ]
        return SweepResult(Sweep(**values["what"]), runs, values.get("is_whole", True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{path} was not written by `python -m benchmarks frontier --json`"
        ) from error
