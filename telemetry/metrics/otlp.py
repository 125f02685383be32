"""OTLP metric exporter over gRPC, based on the OpenTelemetry SDK.

It reads the registry that Prometheus reads, so that both report the same values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from baton.telemetry import names
from baton.telemetry.logs import exporter_log
from baton.telemetry.metrics.names import BY_PROMETHEUS_NAME, Metric, MetricKind
from baton.telemetry.tracing.outlet import ExportFailed
from baton.telemetry.tracing.spans import Attributes

LOG = exporter_log()
TIMEOUT_S = 3
CUMULATIVE = AggregationTemporality.CUMULATIVE
NO_SPAN = 0  # a placeholder: without a span id, the encoder omits the trace id, too
CONVENTIONS = {
    name.replace(".", "_"): name
    for name in (names.OPERATION, names.PROVIDER, names.RESPONSE_MODEL, names.ERROR_TYPE)
}

Labels = tuple[tuple[str, str], ...]
Times = tuple[int, int]  # start of the process, and now


class OtlpMetrics:
    def __init__(self, endpoint: str, registry: CollectorRegistry, attributes: Attributes) -> None:
        insecure = None if endpoint.startswith(("https://", "http://")) else True
        self._exporter = OTLPMetricExporter(endpoint=endpoint, insecure=insecure, timeout=TIMEOUT_S)
        self._registry = registry
        self._resource = Resource.create(dict(attributes))
        self._began_ns = time.time_ns()

    def send(self) -> None:
        """Raises ExportFailed."""
        if self._exporter.export(self._read_metrics()) is not MetricExportResult.SUCCESS:
            raise ExportFailed(f"the collector did not accept the metrics: {LOG.reason}")

    def close(self) -> None:
        self._exporter.shutdown(timeout_millis=TIMEOUT_S * 1000)

    def _read_metrics(self) -> MetricsData:
        times = (self._began_ns, time.time_ns())
        metrics = [
            _metric(BY_PROMETHEUS_NAME[family.name], family, times)
            for family in self._registry.collect()
            if family.name in BY_PROMETHEUS_NAME
        ]
        scope = ScopeMetrics(InstrumentationScope(names.SCOPE), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def _metric(metric: Metric, family: Family, times: Times) -> OtlpMetric:
    data: Histogram | Gauge | Sum
    if metric.kind is MetricKind.HISTOGRAM:
        data = Histogram(list(_histogram_points(metric, family, times)), CUMULATIVE)
    elif metric.kind is MetricKind.GAUGE:
        data = Gauge(list(_points(family, times)))
    else:
        data = Sum(list(_points(family, times)), CUMULATIVE, is_monotonic=True)
    return OtlpMetric(metric.name, metric.help, metric.unit, data)


def _points(family: Family, times: Times) -> Iterator[NumberDataPoint]:
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield NumberDataPoint(dict(_labels(sample)), *times, sample.value)


def _histogram_points(metric: Metric, family: Family, times: Times) -> Iterator[HistogramDataPoint]:
    buckets: dict[Labels, list[Sample]] = {}
    totals: dict[Labels, float] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            buckets.setdefault(_labels(sample), []).append(sample)
        elif sample.name.endswith("_sum"):
            totals[_labels(sample)] = sample.value
    for labels, samples in buckets.items():
        counts = [round(sample.value) for sample in samples]  # cumulative
        yield HistogramDataPoint(
            dict(labels),
            *times,
            count=counts[-1],
            sum=totals[labels],
            bucket_counts=[after - before for before, after in pairwise([0, *counts])],
            explicit_bounds=metric.buckets,
            min=None,  # type: ignore[arg-type]  # unknown
            max=None,  # type: ignore[arg-type]
            exemplars=[exemplar for sample in samples for exemplar in _exemplars(sample)],
        )


def _exemplars(sample: Sample) -> Iterator[Exemplar]:
    exemplar = sample.exemplar
    if exemplar is not None:
        at_ns = round(float(exemplar.timestamp or 0) * 1e9)
        trace_id = int(exemplar.labels["trace_id"], 16)
        yield Exemplar({}, float(exemplar.value), at_ns, NO_SPAN, trace_id)


def _labels(sample: Sample) -> Labels:
    """Return the labels of a sample, under their names in the conventions if they have any."""
    return tuple(
        (CONVENTIONS.get(name, name), value)
        for name, value in sample.labels.items()
        if name != "le"
    )
