"""Figures of a serving run: latency quantiles, throughput, goodput. Pure.

Latencies count from the planned send time, so that a client that falls behind does not make the
server look better. A gap is the time between two tokens of one answer; tokens that arrive in one
message have gaps of zero after the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.bench.client import LoadRun, Sample
from baton.bench.load import NO_OBJECTIVES, Slo


@dataclass(frozen=True, slots=True)
class Quantiles:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class ServeFigures:
    duration_s: float
    num_planned: int
    num_answered: int
    num_failed: int
    errors: Mapping[str, int]
    ttft_ms: Quantiles | None  # None: no samples
    itl_ms: Quantiles | None
    tpot_ms: Quantiles | None
    e2e_ms: Quantiles | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    good_share: float
    num_remote: int
    num_local: int
    num_retried: int
    kv_bytes: int
    prefix_hit_tokens: int
    num_late: int  # sends delayed by this client or by the concurrency limit
    client_lag_p99_ms: float
    client_cpu_share: float  # of one core
    is_cut_short: bool


def summarise(run: LoadRun, slo: Slo = NO_OBJECTIVES) -> ServeFigures:
    answered = [one for one in run.samples if one.error is None and one.finish is not None]
    finishes = [one.finish for one in answered if one.finish is not None]
    span_s = max((one.ended_s for one in run.samples), default=0.0) or 1.0
    num_good = sum(meets(one, slo) for one in answered)
    num_remote = sum(finish.served.is_prefill_remote for finish in finishes)
    errors = Counter(one.error for one in run.samples if one.error is not None)
    tpots = [tpot for one in answered if (tpot := tpot_of(one)) is not None]
    return ServeFigures(
        duration_s=run.duration_s,
        num_planned=run.num_planned,
        num_answered=len(answered),
        num_failed=errors.total(),
        errors=dict(errors),
        ttft_ms=quantiles_ms([ttft_of(one) for one in answered if one.arrivals]),
        itl_ms=quantiles_ms([gap for one in answered for gap in gaps_of(one)]),
        tpot_ms=quantiles_ms(tpots),
        e2e_ms=quantiles_ms([one.ended_s - one.planned_s for one in answered]),
        requests_per_s=len(answered) / span_s,
        input_tokens_per_s=sum(finish.num_prompt_tokens for finish in finishes) / span_s,
        output_tokens_per_s=sum(finish.num_completion_tokens for finish in finishes) / span_s,
        goodput_per_s=num_good / span_s,
        good_share=num_good / len(run.samples) if run.samples else 0.0,
        num_remote=num_remote,
        num_local=len(finishes) - num_remote,
        num_retried=sum(finish.served.attempts > 1 for finish in finishes),
        kv_bytes=sum(finish.served.kv_bytes for finish in finishes),
        prefix_hit_tokens=sum(one.served.prompt_tokens_cached_on_decode for one in finishes),
        num_late=sum(one.is_late for one in run.samples),
        client_lag_p99_ms=quantile(run.lags_s, 0.99) * 1e3 if run.lags_s else 0.0,
        client_cpu_share=run.cpu_s / run.duration_s if run.duration_s else 0.0,
        is_cut_short=run.is_cut_short,
    )


def ttft_of(sample: Sample) -> float:
    return sample.arrivals[0][0] - sample.planned_s


def gaps_of(sample: Sample) -> list[float]:
    gaps = [0.0] * (sample.arrivals[0][1] - 1) if sample.arrivals else []
    for (before_s, _), (at_s, num_tokens) in pairwise(sample.arrivals):
        gaps += [at_s - before_s, *[0.0] * (num_tokens - 1)]
    return gaps


def tpot_of(sample: Sample) -> float | None:
    """Return the mean time per token after the first; None for an answer of one token."""
    num_tokens = sum(count for _, count in sample.arrivals)
    if num_tokens < 2:
        return None
    return (sample.arrivals[-1][0] - sample.arrivals[0][0]) / (num_tokens - 1)


def quantiles_ms(values_s: Sequence[float]) -> Quantiles | None:
    if not values_s:
        return None
    p50, p90, p99 = (quantile(values_s, share) * 1e3 for share in (0.5, 0.9, 0.99))
    return Quantiles(sum(values_s) / len(values_s) * 1e3, p50, p90, p99, max(values_s) * 1e3)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def meets(sample: Sample, slo: Slo) -> bool:
    """Return whether an answer was complete and kept all objectives."""
    if sample.error is not None or not sample.arrivals:
        return False
    gaps = gaps_of(sample)
    values = {
        "ttft": ttft_of(sample),
        "itl": quantile(gaps, 0.99) if gaps else 0.0,
        "tpot": tpot_of(sample) or 0.0,
        "e2e": sample.ended_s - sample.planned_s,
    }
    return all(getattr(slo, name) is None or values[name] <= getattr(slo, name) for name in values)
