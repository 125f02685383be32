"""Calls of the node protocol: orders to requests, outputs to events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.core.errors import InvalidRequest
from baton.core.ids import HandoffId, RequestId
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.legs import LegKind
from baton.core.output import Output
from baton.core.pause_mode import PauseMode
from baton.core.request import (
    EMBED,
    ENCODE,
    TOKEN_EMBED,
    EmbedTask,
    EngineRequest,
    ReceiveKv,
    Task,
    TaskOutput,
    task_of,
)
from baton.rpc.errors import UnsupportedInput
from baton.rpc.messages.conversion import HANDOFF, KV_HINTS, PEER, SAMPLING, output_to
from baton.rpc.messages.mapper import Converter, Mapper, enum_converter
from baton.v1 import node_pb2

KIND = enum_converter(LegKind, node_pb2.LegKind.DESCRIPTOR)
# None: resume
PAUSE_MODE = enum_converter(PauseMode, node_pb2.PauseMode.DESCRIPTOR, has_none=True)
MAX_AGE_S = 1e9
# Clients may use 256. Routers append the attempt, the answer's index and the client's token hash.
MAX_NAME_CHARACTERS = 512


def node_request_id(handoff_id: HandoffId) -> RequestId:
    """Return the request id inside a node. It is unique per attempt."""
    return RequestId(str(handoff_id))


def handoff_id_of(request_id: RequestId) -> HandoffId:
    """Return the hand-off id of an attempt: the inverse of `node_request_id`."""
    name, _, attempt = request_id.rpartition("#")
    return HandoffId(name, int(attempt))


def _valid_age(age_s: float) -> float:
    """Return the age, or 0 if it is negative or NaN, which would break the order of the queue."""
    return age_s if 0 <= age_s < MAX_AGE_S else 0.0


SEQUENCE = Mapper(
    EngineRequest,
    node_pb2.Sequence,
    converters={"sampling": SAMPLING.converter, "age_s": Converter(_valid_age)},
    # Of the order, or in `cache_hints` and `embed`.
    unmapped=(
        "request_id",
        "registration",
        "arrival_s",
        "receive_from",
        "send_to",
        "tenant",
        "kv_hints",
        "cache_hints",
        "task",
        "embed",
    ),
)


def engine_request(order: node_pb2.LegOrder, now: float) -> EngineRequest:
    """Return the request of an order that arrives now. Raises InvalidRequest, UnsupportedInput."""
    handoff_id = HANDOFF.from_message(order.handoff_id)
    sequence = order.sequence
    _check_sequence(sequence, handoff_id)
    hints = KV_HINTS.from_message(sequence.cache_hints.hints)
    receive_from = None
    if order.HasField("receives_from"):
        receive_from = ReceiveKv(handoff_id, PEER.from_message(order.receives_from))
    task = _task_from(sequence, KIND.from_message(order.kind), hints)
    if not task.has_decode_leg and (order.sends or receive_from is not None):
        raise UnsupportedInput(f"a request to {task.name} takes no part in a hand-off")
    return SEQUENCE.from_message(
        sequence,
        request_id=node_request_id(handoff_id),
        arrival_s=now,
        tenant=sequence.cache_hints.tenant,
        kv_hints=hints,
        task=task,
        receive_from=receive_from,
        send_to=handoff_id if order.sends else None,
    )


def _task_from(sequence: node_pb2.Sequence, kind: LegKind, hints: KvHints) -> Task:
    if sequence.HasField("embed"):
        task = TOKEN_EMBED if sequence.embed.per_token else EMBED
        return replace(task, second_text_start=sequence.embed.second_text_start)
    return ENCODE if kind is LegKind.ENCODE else task_of(hints)


def _embed_to(task: Task) -> node_pb2.Embed | None:
    if not isinstance(task, EmbedTask):
        return None
    return node_pb2.Embed(
        second_text_start=task.second_text_start, per_token=task.output is TaskOutput.VECTORS
    )


def _check_sequence(sequence: node_pb2.Sequence, handoff_id: HandoffId) -> None:
    hints, client = sequence.cache_hints, sequence.client
    names = handoff_id.request_id, sequence.cache_salt, hints.tenant, client
    adapter = sequence.adapter
    for name in (*names, adapter.name, adapter.id, adapter.path):
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"a request id, cache salt, tenant, client or adapter has {len(name)} characters; "
                f"the limit is {MAX_NAME_CHARACTERS}"
            )
    if adapter.name and not adapter.id:
        raise InvalidRequest("the adapter has a name, but no id")
    if sequence.sampling.stop:
        raise UnsupportedInput("nodes have no tokenizer: the router must apply stop strings")


def leg_order(kind: LegKind, request: EngineRequest) -> node_pb2.LegOrder:
    receive = request.receive_from
    return node_pb2.LegOrder(
        kind=KIND.to_message(kind),
        handoff_id=HANDOFF.to_message(handoff_id_of(request.request_id)),
        sequence=SEQUENCE.to_message(
            request, cache_hints=_cache_hints_to(request), embed=_embed_to(request.task)
        ),
        sends=request.send_to is not None,
        receives_from=None if receive is None else PEER.to_message(receive.source),
    )


def _cache_hints_to(request: EngineRequest) -> node_pb2.CacheHints | None:
    """Return None without hints and tenant: an unset message costs nothing."""
    if request.kv_hints != NO_KV_HINTS:
        hints = KV_HINTS.to_message(request.kv_hints)
        return node_pb2.CacheHints(hints=hints, tenant=request.tenant)
    return node_pb2.CacheHints(tenant=request.tenant) if request.tenant else None


@dataclass(frozen=True, slots=True)
class CallReport:
    """Statistics of a leg, reported by its node."""

    kv_bytes: int = 0  # received
    kv_blocks: int = 0
    kv_transport: str = ""
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_proposed: int = 0
    tokens_accepted: int = 0
    kv_conversion: str = ""  # empty: the nodes have the same blocks
    prompt_tokens_loaded: Mapping[str, int] = field(default_factory=dict)  # by tier


SUMMARY = Mapper(CallReport, node_pb2.LegSummary)


def event_to(output: Output, report: CallReport | None) -> node_pb2.CallEvent:
    if report is None:
        return node_pb2.CallEvent(output=output_to(output))
    return node_pb2.CallEvent(output=output_to(output), summary=SUMMARY.to_message(report))


def report_from(event: node_pb2.CallEvent) -> CallReport | None:
    return SUMMARY.from_message(event.summary) if event.HasField("summary") else None
