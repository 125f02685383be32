"""What a process counts, for Prometheus. OpenMetrics adds an exemplar: the trace of a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.errors import InvalidConfig
from kv_transfer.records import Role, TransferRecord
from telemetry import metric_names as names
from telemetry.node_timeline import DONE
from telemetry.request_timeline import RequestTimeline
from telemetry.spans import Outcome

log = logging.getLogger(__name__)

# Told at each scrape: by name, or by name and the value of its one label.
Reading = Mapping[str, float | Mapping[str, float]]
Read = Callable[[], Reading]


class RouterMetrics:
    """Every request counts, traced or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._duration = _histogram(registry, names.DURATION, names.DURATION_BUCKETS, "outcome")
        self._ttft = _histogram(registry, names.TIME_TO_FIRST_TOKEN, names.FIRST_TOKEN_BUCKETS)
        self._per_token = _histogram(registry, names.TIME_PER_TOKEN, names.PER_TOKEN_BUCKETS)
        self._queue_wait = _histogram(registry, names.QUEUE_WAIT, names.FIRST_TOKEN_BUCKETS)
        self._requests = _counter(registry, names.REQUESTS, "outcome", "served")
        self._refusals = _counter(registry, names.REFUSALS, "reason")
        self._tokens = _counter(registry, names.TOKENS, "kind")
        self._attempts = _counter(registry, names.ATTEMPTS)
        self._again = _counter(registry, names.AGAIN, "kind")
        self._kv_bytes = _counter(registry, names.REQUEST_KV_BYTES)

    def take(self, timeline: RequestTimeline) -> None:
        """Once, when the request has ended."""
        end, usage = timeline.end, timeline.usage
        if end is None:
            return
        exemplar = _exemplar(timeline)
        outcome = end.outcome.name.lower()
        self._requests.labels(outcome, usage.served if usage else "").inc()
        self._duration.labels(outcome).observe(end.at_s - timeline.received_s, exemplar)
        if end.outcome is Outcome.REFUSED:
            self._refusals.labels(end.error_type).inc()
        if timeline.admitted_s is not None and timeline.tokenized_s is not None:
            self._queue_wait.observe(timeline.admitted_s - timeline.tokenized_s, exemplar)
        self._take_tries(timeline)
        self._take_tokens(timeline, end.at_s, exemplar)

    def _take_tries(self, timeline: RequestTimeline) -> None:
        self._attempts.inc(len(timeline.tries))
        for one in timeline.tries[1:]:
            self._again.labels("migrate" if one.num_prior_tokens else "retry").inc()

    def _take_tokens(
        self, timeline: RequestTimeline, ended_s: float, exemplar: dict[str, str] | None
    ) -> None:
        usage, first_s = timeline.usage, timeline.first_token_s
        if first_s is not None:
            self._ttft.observe(first_s - timeline.received_s, exemplar)
        if usage is None:
            return
        self._tokens.labels("input").inc(timeline.num_prompt_tokens or 0)
        self._tokens.labels("output").inc(usage.num_output_tokens)
        self._kv_bytes.inc(usage.kv_bytes)
        if first_s is not None and usage.num_output_tokens > 1:
            per_token_s = (ended_s - first_s) / (usage.num_output_tokens - 1)
            self._per_token.observe(per_token_s, exemplar)


class NodeMetrics:
    """Fed on the engine's thread."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self.registry = registry
        self._role = role
        self._step = _histogram(registry, names.STEP, names.STEP_BUCKETS)
        self._batch = _histogram(registry, names.BATCH, names.BATCH_BUCKETS)
        self._computed = _counter(registry, names.PROMPT_TOKENS_COMPUTED, "role")
        self._computed.labels(role)  # 0 is worth telling, too
        self._handoffs = _counter(registry, names.HANDOFFS, "direction", "outcome")
        self._kv_bytes = _counter(registry, names.KV_BYTES, "direction", "transport")
        self._transfer = _histogram(registry, names.TRANSFER, names.STEP_BUCKETS, "direction")
        self._rate = _histogram(registry, names.RATE, names.RATE_BUCKETS)
        self._overlap = _histogram(registry, names.OVERLAP, names.SHARE_BUCKETS)

    def step_ended(self, took_s: float, num_requests: int) -> None:
        self._step.observe(took_s)
        self._batch.observe(num_requests)

    def prompt_started(self, num_tokens: int) -> None:
        """So many tokens of a prompt will be run through the model here."""
        self._computed.labels(self._role).inc(num_tokens)

    def take(self, record: TransferRecord) -> None:
        direction = record.role.value
        outcome = "done" if record.outcome in DONE else "failed"
        self._handoffs.labels(direction, outcome).inc()
        self._kv_bytes.labels(direction, record.transport).inc(record.num_bytes)
        if record.ended_s is not None:
            self._transfer.labels(direction).observe(record.ended_s - record.began_s)
        if record.role is Role.SENT and record.num_bytes:
            self._overlap.observe(record.overlap)
            if record.gigabytes_per_s is not None:
                self._rate.observe(record.gigabytes_per_s)


@dataclass(frozen=True, slots=True)
class _Readings(Collector):
    """Asked at each scrape."""

    read: Read

    def collect(self) -> Iterator[Metric]:
        for name, value in self.read().items():
            family = CounterMetricFamily if name in names.TOTALS else GaugeMetricFamily
            if isinstance(value, Mapping):
                metric = family(name, names.HELP[name], labels=[names.LABELS[name]])
                for label, number in value.items():
                    metric.add_metric([label], number)
            else:
                metric = family(name, names.HELP[name], value=value)
            yield metric


@contextmanager
def metrics_served(registry: CollectorRegistry, host: str, port: int, read: Read) -> Iterator[int]:
    """The port that was taken, from here to the end of the block."""
    registry.register(_Readings(read))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise InvalidConfig(
            f"cannot serve metrics on {host}:{port} ({error}); choose another --metrics-port"
        ) from error
    log.info("metrics on http://%s:%d/metrics", host, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _counter(registry: CollectorRegistry, name: str, *labels: str) -> Counter:
    return Counter(name, names.HELP[name], labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, buckets: tuple[float, ...], *labels: str
) -> Histogram:
    return Histogram(name, names.HELP[name], labels, buckets=buckets, registry=registry)


def _exemplar(timeline: RequestTimeline) -> dict[str, str] | None:
    context = timeline.context
    return {"trace_id": context.trace_hex} if context.is_sampled else None
