"""Calls of the node protocol: one kind for both roles, in messages of each role. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.rpc.messages.conversion import output_to
from baton.rpc.messages.mapper import Mapper
from baton.rpc.messages.sequences import Order, decode_order, prefill_order
from baton.rpc.node_info import NodeRole
from baton.v1 import node_pb2

Request = node_pb2.PrefillRequest | node_pb2.DecodeRequest
Response = node_pb2.PrefillResponse | node_pb2.DecodeResponse


@dataclass(frozen=True, slots=True)
class CallReport:
    """Statistics of a request on one node, reported by it. Prefill nodes report the prompt only."""

    kv_bytes: int = 0  # received
    kv_blocks: int = 0
    kv_transport: str = ""
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_proposed: int = 0
    tokens_accepted: int = 0
    kv_conversion: str = ""  # empty: the nodes have the same blocks
    prompt_tokens_loaded: Mapping[str, int] = field(default_factory=dict)  # by tier


NOT_OF_PREFILL = (
    "kv_bytes",
    "kv_blocks",
    "kv_transport",
    "prompt_tokens_computed",
    "tokens_proposed",
    "tokens_accepted",
    "kv_conversion",
)


@dataclass(frozen=True, slots=True)
class CallMessages:
    """Messages of the calls to nodes of one role."""

    order_to: Callable[[EngineRequest], Order]
    response: type[Any]
    report_field: str  # of CallEvent
    reports: Mapper[CallReport, Any]

    def event_to(self, output: Output, report: CallReport | None) -> node_pb2.CallEvent:
        if report is None:
            return node_pb2.CallEvent(output=output_to(output))
        message = {self.report_field: self.reports.to_message(report)}
        return node_pb2.CallEvent(output=output_to(output), **message)

    def report_from(self, event: node_pb2.CallEvent) -> CallReport | None:
        if not event.HasField(self.report_field):  # type: ignore[arg-type]
            return None
        return self.reports.from_message(getattr(event, self.report_field))


CALL_MESSAGES = {
    NodeRole.PREFILL: CallMessages(
        prefill_order,
        node_pb2.PrefillResponse,
        "prefill_summary",
        Mapper(CallReport, node_pb2.PrefillSummary, unmapped=NOT_OF_PREFILL),
    ),
    NodeRole.DECODE: CallMessages(
        decode_order,
        node_pb2.DecodeResponse,
        "summary",
        Mapper(CallReport, node_pb2.DecodeSummary),
    ),
}
