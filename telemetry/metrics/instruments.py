"""Metrics of a process, in a registry of prometheus_client.

With OpenMetrics, samples have exemplars: the trace of a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from baton.core.ids import HandoffId
from baton.engine.plan import Plan, StepObserver, StepRecord
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.types import NOT_CACHED, TOO_MANY_PULLS
from baton.telemetry import names
from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.names import Metric, MetricKind
from baton.telemetry.tracing.node_timeline import DONE, WITHDRAWN
from baton.telemetry.tracing.request_timeline import RequestTimeline
from baton.telemetry.tracing.spans import SpanOutcome, TraceContext

PROVIDER = "baton"
VERDICTS = ("bystander", "suspect", "poison")

# Values read at a scrape: by metric, or by metric and the value of its only label.
Reading = Mapping[Metric, float | Mapping[str, float]]
Read = Callable[[], Reading]
# Returns the trace context of a hand-off's request; None if it is not traced.
HandoffContext = Callable[[HandoffId], TraceContext | None]
UNUSED_STATES = ("free", "cached")


class RouterMetrics:
    """Metrics of the router. Every request is counted, traced or not."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._duration = _histogram(registry, counted.DURATION)
        self._ttft = _histogram(registry, counted.TIME_TO_FIRST_TOKEN)
        self._per_token = _histogram(registry, counted.TIME_PER_TOKEN)
        self._queue_wait = _histogram(registry, counted.QUEUE_WAIT)
        self._requests = _counter(registry, counted.REQUESTS)
        self._refusals = _counter(registry, counted.REFUSALS)
        self._tokens = _counter(registry, counted.TOKENS)
        self._attempts = _counter(registry, counted.ATTEMPTS)
        self._suspects = _counter(registry, counted.SUSPECTS)
        for verdict in VERDICTS:  # export zeros, too
            self._suspects.labels(verdict)
        self._kv_bytes = _counter(registry, counted.REQUEST_KV_BYTES)

    def refused(self, reason: str) -> None:
        """Count a request that was refused before it had a timeline."""
        self._refusals.labels(reason).inc()

    def take(self, timeline: RequestTimeline) -> None:
        """Count a request. Called once, when it has ended."""
        end = timeline.end
        if end is None:
            return
        exemplar = _exemplar(timeline.context)
        self._requests.labels(end.outcome.name.lower(), timeline.served).inc()
        duration = self._duration.labels(*_call(timeline), end.error_type)
        duration.observe(end.at_s - timeline.received_s, exemplar)
        if end.outcome is SpanOutcome.REFUSED:
            self.refused(end.error_type)
        if timeline.admitted_s is not None and timeline.tokenized_s is not None:
            self._queue_wait.observe(timeline.admitted_s - timeline.tokenized_s, exemplar)
        self._count_attempts(timeline)
        for judgement in timeline.judgements:
            self._suspects.labels(judgement.verdict).inc()
        self._observe_times(timeline, end.at_s, exemplar)
        if timeline.was_dispatched and end.outcome is not SpanOutcome.REFUSED:
            outcome = end.outcome.name.lower()
            self._tokens.labels("input", outcome).inc(timeline.num_prompt_tokens or 0)
            self._tokens.labels("output", outcome).inc(timeline.num_output_tokens)

    def _count_attempts(self, timeline: RequestTimeline) -> None:
        for attempt in timeline.tries:
            kind = "migrate" if attempt.num_prior_tokens else "retry"
            self._attempts.labels("first" if attempt.number == 1 else kind).inc()

    def _observe_times(
        self, timeline: RequestTimeline, ended_s: float, exemplar: dict[str, str] | None
    ) -> None:
        finish, first_s, call = timeline.finish, timeline.first_token_s, _call(timeline)
        if first_s is not None:
            self._ttft.labels(*call).observe(first_s - timeline.received_s, exemplar)
        if finish is None:
            return
        self._kv_bytes.inc(finish.served.kv_bytes)
        if first_s is not None and timeline.num_output_tokens > 1:
            per_token_s = (ended_s - first_s) / (timeline.num_output_tokens - 1)
            self._per_token.labels(*call).observe(per_token_s, exemplar)


class NodeMetrics(StepObserver):
    """Metrics of a node's passes and hand-offs."""

    def __init__(self, role: str, context_of: HandoffContext = lambda _: None) -> None:
        registry = self.registry = CollectorRegistry()
        self._context_of = context_of
        self._step = _histogram(registry, counted.STEP)
        self._batch = _histogram(registry, counted.BATCH)
        # Created here to export zeros, too.
        self._computed = _counter(registry, counted.PROMPT_TOKENS_COMPUTED).labels(role)
        self._handoffs = _counter(registry, counted.HANDOFFS)
        self._kv_bytes = _counter(registry, counted.KV_BYTES)
        self._transfer = _histogram(registry, counted.TRANSFER)
        self._rate = _histogram(registry, counted.RATE)
        self._overlap = _histogram(registry, counted.OVERLAP)
        self._tier_load = _histogram(registry, counted.TIER_LOAD)
        self._staged_bytes = _counter(registry, counted.STAGED_BYTES)
        self._staged_copy = _histogram(registry, counted.STAGED_COPY)
        for direction in (TransferRole.SENT.value, TransferRole.RECEIVED.value):
            self._staged_bytes.labels(direction)
            self._staged_copy.labels(direction)
        self.observe_adapter_load = _histogram(registry, counted.ADAPTER_LOAD).observe

    def count_loads_of(self, tier: str) -> Callable[[float], None]:
        """Return an observer of the seconds of a load from a tier. Thread-safe."""
        return self._tier_load.labels(tier).observe

    def note_staged(self, role: TransferRole, num_bytes: int, seconds: float) -> None:
        """Count a copy between a device and pinned host memory. Any thread may call it."""
        self._staged_bytes.labels(role.value).inc(num_bytes)
        self._staged_copy.labels(role.value).observe(seconds)

    def note_pass(self, plan: Plan, began_s: float, ended_s: float) -> None:
        if not plan.num_scheduled_tokens:
            return
        self._step.observe(ended_s - began_s)
        self._batch.observe(len(plan.num_scheduled_tokens))
        if plan.num_prompt_tokens:
            self._computed.inc(plan.num_prompt_tokens)

    def note_end(self, step: StepRecord) -> None:
        for record in step.transfers:
            self.take(record, self._context_of(record.handoff_id))

    def take(self, record: TransferRecord, trace: TraceContext | None) -> None:
        """Count a hand-off. Called once, when it has ended on this node."""
        direction, outcome = record.role.value, _outcome(record)
        self._handoffs.labels(direction, outcome).inc()
        if outcome != "done" or not record.num_bytes:
            return
        exemplar = None if trace is None else _exemplar(trace)
        self._kv_bytes.labels(direction, record.transport).inc(record.num_bytes)
        if record.ended_s is not None:
            took_s = record.ended_s - record.began_s
            self._transfer.labels(direction).observe(took_s, exemplar)
        if record.role is TransferRole.SENT:
            self._overlap.observe(record.overlap, exemplar)
        if record.gigabytes_per_s is not None:
            self._rate.observe(record.gigabytes_per_s, exemplar)


@dataclass(frozen=True, slots=True)
class ScrapeCollector(Collector):
    """Collector of values that are read at each scrape instead of counted here."""

    read: Read

    def collect(self) -> Iterator[Family]:
        for metric, value in self.read().items():
            is_total = metric.kind is MetricKind.COUNTER
            kind = CounterMetricFamily if is_total else GaugeMetricFamily
            family = kind(metric.prometheus, metric.help, labels=metric.labels)
            by_label = value if isinstance(value, Mapping) else {None: value}
            for label, number in by_label.items():
                family.add_metric([] if label is None else [label], number)
            yield family

    def describe(self) -> tuple[Family, ...]:
        """Return nothing: registration must not read values before the process is ready."""
        return ()


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return body and content type: OpenMetrics if the client accepts it, else Prometheus text."""
    encode, content_type = choose_encoder(accept)
    # prometheus_client escapes the colons of samples in OpenMetrics, but not of their families.
    return encode(registry).replace(b"\nvllm_", b"\nvllm:"), content_type


def _counter(registry: CollectorRegistry, metric: Metric) -> Counter:
    return Counter(metric.prometheus, metric.help, metric.labels, registry=registry)


def _histogram(registry: CollectorRegistry, metric: Metric) -> Histogram:
    return Histogram(
        metric.prometheus, metric.help, metric.labels, buckets=metric.buckets, registry=registry
    )


def _call(timeline: RequestTimeline) -> tuple[str, str, str]:
    """Return the call labels. The model is the served one: clients could send any name."""
    attributes = timeline.request_attributes
    operation, model = attributes.get(names.OPERATION, ""), attributes.get(names.RESPONSE_MODEL, "")
    return str(operation), PROVIDER, str(model)


def _outcome(record: TransferRecord) -> str:
    if record.outcome in DONE:
        return "done"
    if record.outcome.endswith((NOT_CACHED, TOO_MANY_PULLS)):
        return "refused"
    return "withdrawn" if record.outcome in WITHDRAWN else "failed"


def _exemplar(trace: TraceContext) -> dict[str, str] | None:
    return {"trace_id": trace.trace_hex} if trace.is_sampled else None


class AdaptersInUse(NamedTuple):
    """Names of adapters that requests use."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VllmGauges(Collector):
    """Collector that derives vLLM's gauges from a node's reading."""

    read: Read
    block_size: int
    max_loras: int = 0  # 0: no adapters
    adapters: Callable[[], AdaptersInUse] = AdaptersInUse

    def collect(self) -> Iterator[Family]:
        """Yield nothing before the first reading of the engine."""
        reading = self.read()
        waiting, blocks = reading.get(counted.WAITING), reading.get(counted.BLOCKS)
        if not isinstance(waiting, Mapping) or not isinstance(blocks, Mapping):
            return
        num_blocks = sum(blocks.values())
        unused = sum(blocks[state] for state in UNUSED_STATES)
        running = reading[counted.RUNNING]
        assert not isinstance(running, Mapping)
        yield _gauge("num_requests_running", "Requests in the batch.", running)
        yield _gauge("num_requests_waiting", "Requests that wait.", sum(waiting.values()))
        usage = 1 - unused / num_blocks if num_blocks else 0.0
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        facts = {"block_size": str(self.block_size), "num_gpu_blocks": str(round(num_blocks))}
        yield _gauge("cache_config_info", "Size of the KV cache.", 1, facts)
        if self.max_loras:
            yield self._lora_info()

    def describe(self) -> tuple[Family, ...]:
        return ()

    def _lora_info(self) -> Family:
        in_use = self.adapters()
        labels = {
            "max_lora": str(self.max_loras),
            "running_lora_adapters": ",".join(in_use.running),
            "waiting_lora_adapters": ",".join(in_use.waiting),
        }
        text = "Adapters that requests use. The value is the time of the reading."
        return _gauge("lora_requests_info", text, time.time(), labels)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    labels = labels or {}
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
