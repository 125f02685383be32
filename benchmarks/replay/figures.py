"""Figures of a replay: reuse of KV by source, latency, goodput. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.bench.figures import Quantiles, gaps_of, meets, quantiles_ms, ttft_of
from baton.bench.load import Slo
from benchmarks.replay.run import ReplayedRequest, ReplayRun
from benchmarks.replay.sources import num_reused


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    duration_s: float
    num_planned: int
    num_answered: int
    num_truncated: int  # prompts that were longer than the model can take
    num_cut_tokens: int
    num_late: int  # sends delayed by this client or by the limit of requests in flight
    errors: Mapping[str, int]
    # Tokens of answered requests.
    num_prompt_tokens: int
    num_output_tokens: int
    num_distinct_tokens: int  # in whole blocks: the working set
    reuse: float  # share of the prompt tokens that were not computed
    ideal_reuse: float  # the same with an infinite cache
    reuse_of_ideal: float | None  # None: nothing could be reused
    tokens_by_source: Mapping[str, int]
    lost_by_reason: Mapping[str, int]
    ttft_ms: Quantiles | None  # None: no samples
    itl_ms: Quantiles | None
    good_requests_per_s: float
    good_tokens_per_s: float
    is_cut_short: bool


def summarise(run: ReplayRun, slo: Slo) -> ReplayFigures:
    answered = answered_requests(run)
    samples = [one.sample for one in answered]
    good = [one for one in samples if meets(one, slo)]
    span_s = max((one.sample.ended_s for one in run.requests), default=0.0) or 1.0
    cut = [one.num_cut_tokens for one in run.requests if one.num_cut_tokens]
    errors = Counter(one.sample.error for one in run.requests if one.sample.error is not None)
    num_prompt_tokens = sum(one.num_prompt_tokens for one in answered)
    num_ideal_tokens = sum(one.num_ideal_tokens for one in answered)
    by_source = _added(one.by_source for one in answered)
    num_tokens = num_prompt_tokens or 1
    reuse = num_reused(by_source) / num_tokens
    return ReplayFigures(
        duration_s=run.duration_s,
        num_planned=run.num_planned,
        num_answered=len(answered),
        num_truncated=len(cut),
        num_cut_tokens=sum(cut),
        num_late=sum(one.sample.is_late for one in run.requests),
        errors=dict(errors),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=sum(len(one.token_ids) for one in samples),
        num_distinct_tokens=run.num_distinct_tokens,
        reuse=reuse,
        ideal_reuse=num_ideal_tokens / num_tokens,
        reuse_of_ideal=reuse * num_tokens / num_ideal_tokens if num_ideal_tokens else None,
        tokens_by_source=by_source,
        lost_by_reason=_added(one.lost for one in answered),
        ttft_ms=quantiles_ms([ttft_of(one) for one in samples if one.arrivals]),
        itl_ms=quantiles_ms([gap for one in samples for gap in gaps_of(one)]),
        good_requests_per_s=len(good) / span_s,
        good_tokens_per_s=sum(len(one.token_ids) for one in good) / span_s,
        is_cut_short=run.is_cut_short,
    )


def answered_requests(run: ReplayRun) -> list[ReplayedRequest]:
    return [
        one for one in run.requests if one.sample.error is None and one.sample.finish is not None
    ]


def request_rows(run: ReplayRun) -> list[dict[str, object]]:
    """Return the figures of each request, for JSON files."""
    return [_row(one) for one in sorted(run.requests, key=lambda one: one.sample.number)]


def _row(one: ReplayedRequest) -> dict[str, object]:
    sample = one.sample
    served = sample.finish.served if sample.finish is not None else None
    return {
        "number": sample.number,
        "session": one.session,
        "planned_s": sample.planned_s,
        "sent_s": sample.sent_s,
        "ended_s": sample.ended_s,
        "ttft_s": ttft_of(sample) if sample.arrivals else None,
        "error": sample.error,
        "prompt_tokens": one.num_prompt_tokens,
        "cut_tokens": one.num_cut_tokens,
        "output_tokens": len(sample.token_ids),
        "ideal_tokens": one.num_ideal_tokens,
        "by_source": dict(one.by_source),
        "lost": dict(one.lost),
        "prefill_node": served.prefill_node if served else "",
        "decode_node": served.decode_node if served else "",
        "attempts": served.attempts if served else 0,
    }


def _added(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in maps:
        total.update(one)
    return dict(total.most_common())
