"""Names and structure of trace spans, on which dashboards and queries depend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.legs import LegKind
from baton.core.media import MediaSegment
from baton.core.request import ENCODE, PREFETCH
from baton.kv_transfer.records import TransferRole
from baton.telemetry import names
from baton.telemetry.resource import Process
from baton.telemetry.tracing.node_timeline import Encoding, NodeFacts, NodeTimeline, Start
from baton.telemetry.tracing.request_timeline import ImageWork, NodeRpcTimeline, leg_name
from baton.telemetry.tracing.spans import End, SpanStatus, TraceContext
from baton.telemetry.tracing.traces import Trace, note_of, traces_of
from tests.support.traces import (
    TRACE_ID,
    a_record,
    a_request,
    a_step,
    an_exported_step,
    an_exported_trace,
    exported_by,
    on_decode,
    on_prefill,
    to_unix_ns,
)

TREE = """\
generate router
  admit router
  route router
  prefill router
    prefill p0
      prefill_wait p0
      prefill_compute p0
      kv_push p0
  decode router
    decode d0
      decode_wait d0
      kv_wait d0
      decode_wait d0
      decode_compute d0"""

PICTURE_TREE = """\
generate router
  admit router
  route router
  encode router
    encode e0
      encode_wait e0
      encode_compute e0
        encode_pictures e0
  prefetch router
    prefetch p0
      prefetch_wait p0
  prefill router
  decode router"""


STEP_TREE = """\
engine_step d0
  schedule d0
  orders d0
  run d0
  poll d0
  update d0"""
STEP = {
    *("baton.role", "baton.node.id", "baton.node.incarnation"),
    *("baton.step.number", "baton.step.rows"),
    *("baton.step.tokens.prefill", "baton.step.tokens.decode"),
    *("baton.step.schedule", "baton.step.orders", "baton.step.run", "baton.step.poll"),
    "baton.step.update",
}


def drawn(trace: Trace) -> str:
    return "\n".join(f"{'  ' * row.depth}{row.span.name} {row.node}" for row in trace.rows)


def test_the_span_tree_of_a_request_is_as_documented() -> None:
    [trace] = traces_of(an_exported_trace())

    assert drawn(trace) == TREE


def test_legs_that_bring_pictures_are_named_after_what_they_do() -> None:
    request = a_request()
    [attempt] = request.tries
    encode, prefetch = leg_name(LegKind.ENCODE, ENCODE), leg_name(LegKind.PREFILL, PREFETCH)
    attempt.legs[:0] = [
        NodeRpcTimeline(encode, 301, "e0", "i3", "h:3", 10.003, End(10.0034)),
        NodeRpcTimeline(prefetch, 302, "p0", "i1", "h:1", 10.0034, End(10.0036)),
    ]
    encoding = NodeTimeline(
        TraceContext(TRACE_ID, 301), NodeFacts("encode", "e0", "i3"), encode, 1, None, 10.0031
    )
    encoding.starts = [Start(10.0032, 0, 16, 5)]
    encoding.encodings = [Encoding(10.0032, 10.0033, frozenset({bytes(32)}))]
    pulling = NodeTimeline(
        TraceContext(TRACE_ID, 302), NodeFacts("prefill", "p0", "i1"), prefetch, 1, None, 10.0035
    )
    pulling.pulls = [replace(a_record(TransferRole.PULLED), began_s=10.0035, ended_s=10.0036)]
    encoding.end, pulling.end = End(10.0034), End(10.0036)

    spans = [
        *exported_by(Process("router", "router-1", "i0"), request.spans(to_unix_ns)),
        *exported_by(Process("encode", "e0", "i3"), encoding.spans(to_unix_ns)),
        *exported_by(Process("prefill", "p0", "i1"), pulling.spans(to_unix_ns)),
    ]
    [trace] = traces_of(spans)
    assert drawn(trace) == PICTURE_TREE
    [wait] = [row.span for row in trace.rows if row.span.name == "prefetch_wait"]
    assert note_of(wait) == "pulled 3 blocks from d0 in 0.1 ms, 4 KiB, for blocks"


SPANS = (
    names.GENERATE, names.ADMIT, names.ROUTE, names.RETRY, names.MIGRATE,
    names.PREFETCH, names.PREFETCH_WAIT, names.ENCODE, names.ENCODE_WAIT, names.ENCODE_COMPUTE,
    names.PREFILL, names.PREFILL_WAIT, names.PREFILL_COMPUTE, names.KV_PUSH,
    names.DECODE, names.KV_WAIT, names.DECODE_WAIT, names.DECODE_COMPUTE,
    names.ENGINE_STEP, names.FETCH_IMAGES, names.PREPARE_IMAGES, names.ENCODE_PICTURES,
)  # fmt: skip

LOAD = {
    *("baton.kv.tier", "baton.kv.blocks", "baton.kv.bytes", "baton.kv.outcome"),
    "baton.kv.duration",
}


def test_work_on_images_is_below_the_admission_and_the_passes() -> None:
    request, node = a_request(), on_prefill()
    request.image_work = [
        ImageWork("fetch_images", 10.0, {names.IMAGES: 1, names.IMAGE_BYTES: 2048}, End(10.0003)),
        ImageWork("prepare_images", 10.0003, {names.IMAGES: 2, names.IMAGES_CACHED: 1}),
    ]
    fox, owl = bytes(32), b"o" * 32
    node.media = (
        MediaSegment(0, 9, b"s" * 32),  # its tokens were cached
        MediaSegment(20, 4, fox),
        MediaSegment(25, 4, fox, first=4),
        MediaSegment(30, 8, owl),
    )
    node.encodings = [Encoding(10.01, 10.03, frozenset({fox}))]
    spans = {one.name: one for one in (*request.spans(to_unix_ns), *node.spans(to_unix_ns))}

    notes = {name: note_of(spans[name]) for name in SPANS[-3:]}
    assert notes == {
        "fetch_images": "1 image, 2 KiB",
        "prepare_images": "2 images, 1 prepared before",
        "encode_pictures": "1 picture, 8 rows",
    }
    assert spans["fetch_images"].parent_id == spans["admit"].span_id
    assert spans["encode_pictures"].parent_id == spans["prefill_compute"].span_id
    assert spans["encode_pictures"].duration_s == pytest.approx(0.02)
    assert note_of(spans["prefill_compute"]).endswith("2 pictures, 1 in memory")


def test_a_tier_load_is_a_span_event_of_the_wait() -> None:
    [wait] = [one for one in on_prefill().spans(to_unix_ns) if one.name == names.PREFILL_WAIT]

    [load] = wait.events
    assert (load.name, set(load.attributes)) == ("kv_load", LOAD)


def test_every_name_is_defined_in_the_names_module() -> None:
    known = {value for name, value in vars(names).items() if name.isupper()}
    reported = [one.span for one in (*an_exported_trace(has_failed_try=True), *an_exported_step())]

    assert {span.name for span in reported} <= set(SPANS)
    assert names.ENGINE_STEP in {span.name for span in reported}
    for span in reported:
        assert set(span.attributes) <= known
        assert {event.name for event in span.events} <= known


def test_a_step_is_a_root_span_linked_to_the_legs_of_its_requests() -> None:
    [step] = a_step().spans(to_unix_ns)
    [leg] = [span for span in on_decode().spans(to_unix_ns) if span.name == names.DECODE]
    [trace] = traces_of(an_exported_step())

    assert (step.name, step.parent_id, set(step.attributes)) == ("engine_step", None, STEP)
    assert (step.links[0].trace_id, step.links[0].span_id) == (leg.trace_id, leg.span_id)
    tree = "\n".join(f"{'  ' * row.depth}{row.span.name} {row.node}" for row in trace.rows)
    assert tree == STEP_TREE
    assert trace.rows[-1].span.ended_ns == step.ended_ns


def test_a_retry_is_linked_to_the_failed_attempt_with_the_reason() -> None:
    spans = a_request(has_failed_try=True).spans(to_unix_ns)

    [again] = [span for span in spans if span.name == names.MIGRATE]
    first, second = [span for span in spans if span.name == names.DECODE]
    assert first.status is SpanStatus.ERROR
    assert first.attributes[names.ERROR_TYPE] == "UNAVAILABLE"
    assert [link.span_id for link in again.links] == [first.span_id]
    assert [link.span_id for link in second.links] == [first.span_id]
    assert [event.name for event in again.events] == [names.LEG_FAILED]
    assert second.parent_id == again.span_id


def test_lost_kv_is_an_error_with_its_reason_and_no_link() -> None:
    spans = on_decode("the peer sent nothing for 10 s").spans(to_unix_ns)

    [wait] = [span for span in spans if span.name == names.KV_WAIT]
    assert wait.status is SpanStatus.ERROR
    assert wait.status_message == "the peer sent nothing for 10 s"
    assert wait.links == ()


def test_spans_of_a_timeline_are_deterministic() -> None:
    timeline = a_request(has_failed_try=True)

    assert timeline.spans(to_unix_ns) == timeline.spans(to_unix_ns)
