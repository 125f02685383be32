"""Trace contexts, and sampling of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.tracing.outlet import BatchExporter
from baton.telemetry.tracing.spans import SpanOutcome, SpanStatus, TraceContext, parse_traceparent
from baton.telemetry.tracing.tracer import Tracer, new_trace_id


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_traceparent_round_trips(trace_id: int, span_id: int, is_on: bool) -> None:
    context = TraceContext(trace_id, span_id, is_on)

    assert parse_traceparent(context.traceparent) == context


@pytest.mark.parametrize(
    "written",
    [
        "",
        "hello",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",  # no trace has this id
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",  # never a version
        "00-" + "1" * 31 + "-" + "1" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",  # in lower case only
    ],
)
def test_a_malformed_traceparent_is_ignored(written: str) -> None:
    assert parse_traceparent(written) is None


def test_a_traceparent_of_a_later_version_is_read_as_far_as_known() -> None:
    written = "01-" + "1" * 32 + "-" + "2" * 16 + "-03-more"

    assert parse_traceparent(written) == TraceContext(int("1" * 32, 16), int("2" * 16, 16))


def test_the_ratio_is_the_share_of_sampled_traces() -> None:
    outlet = BatchExporter("nowhere", lambda spans: None, lambda at_s: 0)
    trace_ids = [new_trace_id() for _ in range(4000)]

    kept = [sum(Tracer(ratio, (outlet,)).draws(one) for one in trace_ids) for ratio in (0, 0.25, 1)]

    assert kept[0] == 0
    assert 800 < kept[1] < 1200
    assert kept[2] == 4000


def test_without_an_exporter_no_context_is_extracted() -> None:
    metadata = (("traceparent", TraceContext(1, 2).traceparent),)

    assert Tracer(1.0).extract_context(metadata) is None
    assert not Tracer(1.0).draws(new_trace_id())


def test_the_status_of_cancelled_is_unset() -> None:
    statuses = {outcome: outcome.status for outcome in SpanOutcome}

    assert statuses.pop(SpanOutcome.OK) is SpanStatus.OK
    assert statuses.pop(SpanOutcome.CANCELLED) is SpanStatus.UNSET
    assert set(statuses.values()) == {SpanStatus.ERROR}
