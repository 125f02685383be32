"""Sample trace of a request through three processes, made by the product's timelines."""

from __future__ import annotations

from baton.core.ids import HandoffId, NodeId
from baton.core.output import Finish, FinishReason, Served
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.telemetry import names
from baton.telemetry.resource import Process
from baton.telemetry.tracing.node_timeline import (
    KvLoad,
    NodeFacts,
    NodeTimeline,
    PrefillChunk,
    Start,
    StepTimeline,
)
from baton.telemetry.tracing.otlp_json import ExportedSpan
from baton.telemetry.tracing.request_timeline import (
    AttemptTimeline,
    NodeRpcTimeline,
    RequestTimeline,
)
from baton.telemetry.tracing.spans import Attributes, End, Span, SpanOutcome, TraceContext

TRACE_ID = 0xABCDEF
STEP_TRACE_ID = 0x57E9 << 112
HANDOFF = HandoffId("r1", 1)


def to_unix_ns(at_s: float) -> int:
    return 1_700_000_000_000_000_000 + round(at_s * 1e9)


def a_request(*, has_failed_try: bool = False) -> RequestTimeline:
    timeline = RequestTimeline("r1", TraceContext(TRACE_ID, 1), None, 10.0)
    timeline.documents_read_s = 10.0005
    timeline.num_prompt_tokens, timeline.tokenized_s, timeline.admitted_s = 40, 10.001, 10.002
    if has_failed_try:
        broken = an_attempt(1, 10.002, 100)
        broken.legs[1].end = End(10.4, SpanOutcome.FAILED, "UNAVAILABLE", "<gone> & away")
        broken.end = End(10.41, SpanOutcome.FAILED, "NODE_FAILED")
        timeline.tries.append(broken)
    began_s = 10.42 if has_failed_try else 10.002
    timeline.tries.append(an_attempt(len(timeline.tries) + 1, began_s, 200))
    timeline.first_token_s = 10.1
    timeline.num_output_tokens = 9
    served = Served("p0", "d0", True, "", 4096, 3, "nixl", 0, 0, 1)
    timeline.finish = Finish(FinishReason.LENGTH, 40, 9, 10.002, 10.1, 10.2, 11.0, served)
    timeline.end = End(11.0, rpc_status="OK")
    return timeline


def an_attempt(number: int, began_s: float, span_id: int) -> AttemptTimeline:
    one = AttemptTimeline(number, 5 * (number - 1), span_id, span_id + 9)
    one.chosen_s = began_s + 0.001
    one.choice = {
        names.POLICY: "prefix_aware",
        names.CANDIDATES_PREFILL: 1,
        names.CANDIDATES_DECODE: 1,
        names.CHOSEN_PREFILL: "p0",
        names.CHOSEN_DECODE: "d0",
        names.CHOSEN_HOLDER: "d1",
        names.PROMISED_TOKENS: 32,
        names.PREDICTED_HIT_TOKENS: 0,
    }
    one.legs = [
        NodeRpcTimeline("prefill", span_id + 1, "p0", "i1", "h:1", began_s + 0.002, End(10.3)),
        NodeRpcTimeline("decode", span_id + 2, "d0", "i2", "h:2", began_s + 0.002, End(11.0)),
    ]
    return one


def a_record(role: TransferRole, outcome: str = "done") -> TransferRecord:
    return TransferRecord(
        HANDOFF,
        role,
        "nixl",
        10.02,
        peer=NodeId("d0"),
        outcome=outcome,
        num_blocks=3,
        num_bytes=4096,
        num_writes=2,
        num_descriptors=2,
        first_post_s=10.05,
        last_written_s=10.15,
        ended_s=10.2,
    )


def on_prefill() -> NodeTimeline:
    facts = NodeFacts("prefill", "p0", "i1", verifies_kv=True, block_bytes=4096)
    timeline = NodeTimeline(TraceContext(TRACE_ID, 201), facts, "prefill", 1, 209, 10.004)
    timeline.starts = [Start(10.01, 16, 24, 5)]
    timeline.loads = [KvLoad(10.005, 1, 10.009, ("host",))]
    timeline.chunks = [PrefillChunk(10.01, 10.05, 16), PrefillChunk(10.05, 10.09, 8)]
    timeline.record = a_record(TransferRole.SENT, "announced")
    timeline.end = End(10.25, rpc_status="OK")
    return timeline


def on_decode(outcome: str = "done") -> NodeTimeline:
    timeline = NodeTimeline(
        TraceContext(TRACE_ID, 202), NodeFacts("decode", "d0", "i2"), "decode", 1, 209, 10.004
    )
    timeline.record = a_record(TransferRole.RECEIVED, outcome)
    timeline.starts = [Start(10.21, 40, 1, 7)]
    timeline.num_output_tokens, timeline.num_steps = 9, 8
    timeline.end = End(10.98, rpc_status="OK")
    return timeline


def a_step() -> StepTimeline:
    """Return a step of the decode node with the request of TRACE_ID and an unsampled one."""
    return StepTimeline(
        TraceContext(STEP_TRACE_ID, 77),
        NodeFacts("decode", "d0", "i2"),
        (10.30, 10.3001, 10.3002, 10.3052, 10.3053, 10.306),
        number=12,
        num_rows=3,
        num_prefill_tokens=40,
        num_decode_tokens=2,
        requests=(on_decode().context, TraceContext(0xDEAD, 1)),
    )


def exported_by(process: Process, spans: list[Span]) -> list[ExportedSpan]:
    resource: Attributes = process.attributes
    return [ExportedSpan(span, resource) for span in spans]


def an_exported_trace(*, has_failed_try: bool = False) -> list[ExportedSpan]:
    request = a_request(has_failed_try=has_failed_try).spans(to_unix_ns)
    return [
        *exported_by(Process("router", "router-1", "i0"), request),
        *exported_by(Process("prefill", "p0", "i1"), on_prefill().spans(to_unix_ns)),
        *exported_by(Process("decode", "d0", "i2"), on_decode().spans(to_unix_ns)),
    ]


def an_exported_step() -> list[ExportedSpan]:
    return exported_by(Process("decode", "d0", "i2"), a_step().spans(to_unix_ns))
