"""Export queue of spans: it never blocks, and counts dropped traces."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.telemetry.tracing import outlet as module
from baton.telemetry.tracing.outlet import BatchExporter, ExportFailed
from baton.telemetry.tracing.spans import Span
from tests.support.spans import OneSpanTimeline, a_span


def test_all_accepted_spans_are_exported_when_the_exporter_closes() -> None:
    exported: list[Span] = []
    spans = [a_span(number) for number in range(1, 200)]

    with BatchExporter("test", exported.extend, lambda at_s: 0) as outlet:
        for span in spans:
            outlet.take(OneSpanTimeline(span))

    assert exported == spans
    assert outlet.num_dropped == 0


def test_a_slow_exporter_drops_traces_and_does_not_block() -> None:
    may_go_on, is_busy = threading.Event(), threading.Event()

    def export(spans: Sequence[Span]) -> None:
        is_busy.set()
        may_go_on.wait()

    with BatchExporter("slow", export, lambda at_s: 0) as outlet:
        outlet.take(OneSpanTimeline(a_span()))
        is_busy.wait()
        for _ in range(module.MAX_WAITING + 5):
            outlet.take(OneSpanTimeline(a_span()))
        may_go_on.set()

    assert outlet.num_dropped == 5


def test_a_failed_export_is_counted_and_the_next_batch_is_exported() -> None:
    failures = [ExportFailed("away")]
    exported: list[Span] = []
    has_failed = threading.Event()

    def export(spans: Sequence[Span]) -> None:
        if failures:
            has_failed.set()
            raise failures.pop()
        exported.extend(spans)

    with BatchExporter("shaky", export, lambda at_s: 0) as outlet:
        outlet.take(OneSpanTimeline(a_span(1)))
        has_failed.wait()
        outlet.take(OneSpanTimeline(a_span(2)))

    assert outlet.num_failed == 1
    assert [span.span_id for span in exported] == [2]
