"""Rounds of the same load, alternately on clusters or with settings that are to be compared."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.client import AsyncClient, Generation
from baton.core.sampling import SamplingParams
from baton.telemetry.tracing.spans import TraceContext
from baton.telemetry.tracing.tracer import new_span_id, new_trace_id

SURE = 0.95


@dataclass(frozen=True, slots=True)
class RoundsBench:
    model: str
    num_streams: int = 16
    num_requests: int = 40
    prompt_tokens: int = 64
    answer_tokens: int = 24
    num_rounds: int = 15  # many short ones, since adjacent rounds see the same machine drift
    node_arguments: tuple[str, ...] = ("--kv-cache-memory", "128MiB", "--threads", "1")


@dataclass(frozen=True, slots=True)
class Variant:
    """Cluster that a round's load is sent to, and the share of requests that are traced."""

    address: str
    trace_ratio: float = 0.0


@dataclass(slots=True)
class RoundLoad:
    """Results of one variant by round."""

    tokens_per_s: list[float] = field(default_factory=list)
    intervals_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PairedFigure:
    variant: str
    tokens_per_s: float  # median of the rounds
    of_first: float  # median ratio to the round of the first variant next to it
    at_least: float  # with at_most: 95 % confidence interval of the median ratio
    at_most: float
    p50_itl_ms: float
    p99_itl_ms: float


OnRound = Callable[[str, float], None]


def play(
    bench: RoundsBench, variants: Mapping[str, Variant], on_round: OnRound
) -> list[PairedFigure]:
    """Play the rounds of all variants. The others are compared with the first one."""
    loads, names = {name: RoundLoad() for name in variants}, list(variants)
    for address in {variant.address for variant in variants.values()}:
        asyncio.run(_round(bench, Variant(address), RoundLoad(), seed=0))  # warms up
    for number in range(bench.num_rounds):
        # Rotate the order, so that drift of the machine affects all variants alike.
        first = number % len(names)
        for place, name in enumerate(names[first:] + names[:first], start=1):
            load, seed = loads[name], number * len(names) + place
            asyncio.run(_round(bench, variants[name], load, seed=seed))
            on_round(name, load.tokens_per_s[-1])
    return [figure(name, load, loads[names[0]]) for name, load in loads.items()]


async def _round(bench: RoundsBench, variant: Variant, load: RoundLoad, *, seed: int) -> None:
    """Send one round with new prompts of equal length, so that no prefix cache hits."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(5, 500) for _ in range(bench.prompt_tokens)]
        for _ in range(bench.num_requests)
    ]
    is_traced = [draw.random() < variant.trace_ratio for _ in prompts]
    waiting = asyncio.Semaphore(bench.num_streams)
    async with AsyncClient(variant.address, timeout_s=120) as client:

        async def send(number: int) -> int:
            async with waiting:
                return await _stream(client, bench, prompts[number], is_traced[number], load)

        began_s = time.perf_counter()
        counts = await asyncio.gather(*(send(number) for number in range(bench.num_requests)))
        load.tokens_per_s.append(sum(counts) / (time.perf_counter() - began_s))


async def _stream(
    client: AsyncClient, bench: RoundsBench, prompt: list[int], is_traced: bool, load: RoundLoad
) -> int:
    sampling = SamplingParams(max_tokens=bench.answer_tokens, temperature=0.0, ignore_eos=True)
    context = TraceContext(new_trace_id(), new_span_id(), is_traced)
    num_tokens, last_s = 0, None
    async for chunk in client.stream(prompt, Generation(sampling, traceparent=context.traceparent)):
        if not chunk.token_ids:
            continue
        now_s = time.perf_counter()
        num_tokens += len(chunk.token_ids)
        if last_s is not None:
            load.intervals_s += [(now_s - last_s) / len(chunk.token_ids)] * len(chunk.token_ids)
        last_s = now_s
    return num_tokens


def figure(name: str, load: RoundLoad, first: RoundLoad) -> PairedFigure:
    pairs = zip(load.tokens_per_s, first.tokens_per_s, strict=True)
    ratios = [own / other for own, other in pairs]
    at_least, at_most = median_bounds(ratios)
    percentiles_s = statistics.quantiles(load.intervals_s, n=100)
    return PairedFigure(
        variant=name,
        tokens_per_s=statistics.median(load.tokens_per_s),
        of_first=statistics.median(ratios),
        at_least=at_least,
        at_most=at_most,
        p50_itl_ms=percentiles_s[49] * 1000,
        p99_itl_ms=percentiles_s[98] * 1000,
    )


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median with level SURE.

    The n-th smallest of N values exceeds the median with the probability of fewer than n heads in
    N coin tosses. With fewer than six values the interval is their range, at a lower level.
    """
    ordered, num = sorted(values), len(values)
    chance, left_out = 0.0, 0
    for place in range(num // 2):
        chance += 2 * math.comb(num, place) / 2**num  # at either end
        if chance > 1 - SURE:
            break
        left_out = place
    return ordered[left_out], ordered[num - 1 - left_out]
