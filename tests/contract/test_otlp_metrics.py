"""Metrics export over OTLP: the real exporter and a real gRPC server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2 as service_pb2,
)
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2_grpc as service_pb2_grpc,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics

from baton.core.ids import HandoffId, RequestId
from baton.engine.plan import Plan
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import NodeMetrics, Reading
from baton.telemetry.metrics.readers import export_metrics
from baton.telemetry.options import TelemetryOptions
from baton.telemetry.resource import Process
from baton.telemetry.tracing.spans import TraceContext

PROCESS = Process("prefill", "p0", "1")
TRACE = TraceContext(0xABC, 0xDEF)
PLAN = Plan(num_scheduled_tokens={RequestId("a"): 17, RequestId("b"): 1}, num_prompt_tokens=17)
RECORD = TransferRecord(
    handoff_id=HandoffId("a", 1),
    role=TransferRole.SENT,
    transport="nixl",
    began_s=1.0,
    outcome="announced",
    num_bytes=4_000_000,
    first_post_s=1.0,
    last_written_s=1.002,
    ended_s=1.02,
)


class MetricsCollector(service_pb2_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.got: list[ResourceMetrics] = []
        self.has_some = threading.Event()

    def Export(  # noqa: N802 - gRPC's name
        self, request: service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> service_pb2.ExportMetricsServiceResponse:
        self.got.extend(request.resource_metrics)
        self.has_some.set()
        return service_pb2.ExportMetricsServiceResponse()

    @property
    def last(self) -> dict[str, Metric]:
        return {one.name: one for one in self.got[-1].scope_metrics[0].metrics}


@pytest.fixture
def collector() -> Iterator[MetricsCollector]:
    servicer = MetricsCollector()
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    add: Any = service_pb2_grpc.add_MetricsServiceServicer_to_server
    add(servicer, server)
    servicer.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()


def test_a_collector_gets_the_same_metrics_as_prometheus(collector: MetricsCollector) -> None:
    metrics = NodeMetrics("prefill")
    metrics.note_pass(PLAN, 1.0, 1.003)
    metrics.take(RECORD, TRACE)
    read: Reading = {
        counted.RUNNING: 3.0,
        counted.WAITING: {"ready": 1.0},
        counted.PREEMPTIONS: 5.0,
    }
    options = TelemetryOptions(otlp_endpoint=collector.address, otlp_metrics_every_s=3600)

    with export_metrics(options, PROCESS, metrics.registry, lambda: read):
        pass  # all is sent at the end

    reported = collector.last
    assert set(reported) >= {"baton.kv.transfer", "baton.requests.running", "baton.preemptions"}
    assert set(reported) <= {metric.name for metric in counted.METRICS}
    [transfer] = reported["baton.kv.transfer"].histogram.data_points
    assert reported["baton.kv.transfer"].unit == "s"
    assert transfer.count == 1
    assert transfer.sum == pytest.approx(0.02)
    assert sum(transfer.bucket_counts) == 1
    assert transfer.bucket_counts[list(transfer.explicit_bounds).index(0.025)] == 1
    assert transfer.exemplars[0].trace_id.hex() == TRACE.trace_hex
    [computed] = reported["baton.prompt_tokens.computed"].sum.data_points
    assert computed.as_double == 17
    assert reported["baton.preemptions"].sum.is_monotonic
    [waiting] = reported["baton.requests.waiting"].gauge.data_points
    assert [(one.key, one.value.string_value) for one in waiting.attributes] == [
        ("status", "ready")
    ]
    resource = {one.key: one.value.string_value for one in collector.got[-1].resource.attributes}
    assert resource["service.name"] == "baton-prefill"


def test_metrics_are_sent_while_the_process_runs(collector: MetricsCollector) -> None:
    metrics = NodeMetrics("decode")
    options = TelemetryOptions(otlp_endpoint=collector.address, otlp_metrics_every_s=0.01)

    with export_metrics(options, PROCESS, metrics.registry, lambda: {counted.RUNNING: 1.0}):
        assert collector.has_some.wait(60)


def test_a_missing_collector_delays_no_process(caplog: pytest.LogCaptureFixture) -> None:
    metrics = NodeMetrics("decode")
    options = TelemetryOptions(otlp_endpoint="http://127.0.0.1:1", otlp_metrics_every_s=3600)

    with export_metrics(options, PROCESS, metrics.registry, dict):
        pass

    assert any("metrics could not be exported" in one.getMessage() for one in caplog.records)
