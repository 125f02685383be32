"""Interference benchmark: token gaps of running streams while long prompts arrive.

A few streams decode continuously while a long prompt arrives every few seconds. On a colocated
engine, each prompt delays every stream.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from baton.core.errors import InvalidConfig
from benchmarks.peers.completions_api import (
    CompletionsApi,
    EngineFailed,
    ServedModel,
    StreamedCompletion,
    detached_threads,
    random_prompt,
)
from benchmarks.peers.warm_engines import Start

ANSWER_TOKENS = 8  # of the arriving prompts
WARM_TOKENS = 8  # received by each stream before the first prompt
WARM_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Interference:
    """Load, the same for each engine."""

    num_streams: int = 4
    stream_prompt_tokens: int = 128
    stream_tokens: int = 1500  # or the model's maximum; then the stream restarts
    num_prompts: int = 8
    prompt_tokens: int = 512
    every_s: float = 5.0
    num_rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_streams, self.num_prompts, self.num_rounds) < 1:
            raise InvalidConfig("streams, prompts and rounds must be at least 1")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one engine. `itl`: time between messages with tokens, in ms."""

    itl_p50_ms: float
    itl_p99_ms: float
    itl_most_ms: float
    first_token_p50_s: float
    first_token_most_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class FigureRow:
    """Medians over the rounds. A ratio is this engine over the first one, by round."""

    engine: str
    figures: Figures
    itl_p50_ratio: float
    itl_p99_ratio: float
    first_token_ratio: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine in one round."""

    engine: str
    round: int  # 0 for the first
    figures: Figures


def run(bench: Interference, engines: Mapping[str, Start], on_turn: Callable[[Turn], None]) -> None:
    """Run each engine once per round, one at a time; `on_turn` is called with each turn."""
    for number in range(bench.num_rounds):
        for name, start in engines.items():
            with start() as api:
                on_turn(Turn(name, number, measured(bench, api)))


def measured(bench: Interference, api: CompletionsApi) -> Figures:
    """Put load on an engine and return its figures. Raises EngineFailed."""
    load = _InterferenceLoad(bench, api)
    load.warm_up()
    with load.steady():
        began_s = time.monotonic()
        prompts = load.arrivals(began_s)
        ended_s = time.monotonic()
    return figures(load.streams, prompts, began_s, ended_s)


@dataclass(slots=True)
class _InterferenceLoad:
    bench: Interference
    api: CompletionsApi
    model: ServedModel = field(init=False)
    streams: list[StreamedCompletion] = field(default_factory=list)
    draw: random.Random = field(init=False)
    is_over: threading.Event = field(default_factory=threading.Event)
    warm: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.model = self.api.model()
        self.draw = random.Random(self.bench.seed)

    def warm_up(self) -> None:
        """Send one prompt of each kind, for page faults and compiled shapes."""
        for num_tokens in (self.bench.stream_prompt_tokens, self.bench.prompt_tokens):
            prompt = random_prompt(self.draw, num_tokens)
            self.api.stream(self.model.name, prompt, ANSWER_TOKENS)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Keep all streams decoding within the block."""
        num_streams = self.bench.num_streams
        starts = [
            random_prompt(self.draw, self.bench.stream_prompt_tokens) for _ in range(num_streams)
        ]
        with ThreadPoolExecutor(num_streams) as threads:
            running = [threads.submit(self._stream_repeatedly, start) for start in starts]
            try:
                for _ in running:
                    if not self.warm.acquire(timeout=WARM_TIMEOUT_S):
                        raise EngineFailed(f"{self.api.url} does not decode")
                yield
            finally:
                self.is_over.set()
        for one in running:
            one.result()

    def _stream_repeatedly(self, prompt: Sequence[int]) -> None:
        num_messages = 0
        num_tokens = min(self.bench.stream_tokens, self.model.max_len - len(prompt))

        def is_over() -> bool:
            nonlocal num_messages
            num_messages += 1
            if num_messages == WARM_TOKENS:
                self.warm.release()
            return self.is_over.is_set()

        try:
            while not self.is_over.is_set():
                streamed = self.api.stream(self.model.name, prompt, num_tokens, is_over)
                self.streams.append(streamed)
        finally:
            self.warm.release()  # do not wait for a failed stream

    def arrivals(self, began_s: float) -> list[StreamedCompletion]:
        """Send the prompts open-loop at their times."""
        bench, name = self.bench, self.model.name
        drawn = [random_prompt(self.draw, bench.prompt_tokens) for _ in range(bench.num_prompts)]
        with detached_threads(bench.num_prompts) as threads:
            sent: list[Future[StreamedCompletion]] = []
            for number, prompt in enumerate(drawn):
                time.sleep(max(0.0, began_s + number * bench.every_s - time.monotonic()))
                sent.append(threads.submit(self.api.stream, name, prompt, ANSWER_TOKENS))
            return [one.result() for one in sent]


def figures(
    streams: Sequence[StreamedCompletion],
    prompts: Sequence[StreamedCompletion],
    began_s: float,
    ended_s: float,
) -> Figures:
    """Return the figures of the tokens between the two times."""
    between = [
        ((later_s - earlier_s) * 1e3, num_tokens)
        for one in streams
        for (earlier_s, _), (later_s, num_tokens) in pairwise(one.arrivals)
        if began_s <= earlier_s and later_s <= ended_s
    ]
    gaps_ms = [gap_ms for gap_ms, _ in between]
    if len(gaps_ms) < 2:
        raise EngineFailed("no stream decoded while prompts arrived")
    cuts = statistics.quantiles(gaps_ms, n=100, method="inclusive")
    first_s = [one.first_token_s for one in prompts]
    num_tokens = sum(count for _, count in between) + sum(one.num_tokens for one in prompts)
    return Figures(
        itl_p50_ms=cuts[49],
        itl_p99_ms=cuts[98],
        itl_most_ms=max(gaps_ms),
        first_token_p50_s=statistics.median(first_s),
        first_token_most_s=max(first_s),
        tokens_per_s=num_tokens / (ended_s - began_s),
    )


def num_whole_rounds(turns: Sequence[Turn]) -> int:
    """Return the number of rounds completed by every engine that had a turn."""
    return min(Counter(turn.engine for turn in turns).values(), default=0)


def rows_of(turns: Sequence[Turn]) -> list[FigureRow]:
    """Return the rows of the complete rounds, with ratios to the first engine."""
    num_rounds = num_whole_rounds(turns)
    found: dict[str, list[Figures]] = {}
    for turn in turns:
        if turn.round < num_rounds:
            found.setdefault(turn.engine, []).append(turn.figures)
    first = next(iter(found.values()), [])
    return [_row(name, figures, first) for name, figures in found.items()]


def _row(name: str, found: Sequence[Figures], first: Sequence[Figures]) -> FigureRow:
    def ratio(of: Callable[[Figures], float]) -> float:
        return statistics.median(of(one) / of(own) for one, own in zip(found, first, strict=True))

    medians = {
        figure: statistics.median(getattr(one, figure) for one in found)
        for figure in Figures.__dataclass_fields__
    }
    return FigureRow(
        engine=name,
        figures=Figures(**medians),
        itl_p50_ratio=ratio(lambda one: one.itl_p50_ms),
        itl_p99_ratio=ratio(lambda one: one.itl_p99_ms),
        first_token_ratio=ratio(lambda one: one.first_token_p50_s),
    )
