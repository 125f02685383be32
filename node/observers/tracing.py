"""Trace recording of a node's calls and engine steps, if tracing is enabled and they are sampled.

Timelines are recorded on the threads of gRPC and of the engine; spans are created on another
one, because live span objects would cost time on the engine thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from baton.core.ids import HandoffId, RequestId
from baton.core.legs import LegKind
from baton.core.media import Picture
from baton.core.request import EngineRequest
from baton.engine.plan import Plan, PlanRow, StepObserver, StepRecord
from baton.kv_transfer.external_kv import ExternalOrders, ExternalReports, LoadId
from baton.kv_transfer.records import TransferRecord
from baton.kv_transfer.types import KvOrders
from baton.node.call_streams import CallContext
from baton.rpc.messages.calls import handoff_id_of, node_request_id
from baton.rpc.status import end_of, is_late
from baton.telemetry import names
from baton.telemetry.tracing.node_timeline import (
    Encoding,
    KvLoad,
    NodeFacts,
    NodeTimeline,
    PrefillChunk,
    Start,
    StepTimeline,
)
from baton.telemetry.tracing.request_timeline import leg_name
from baton.telemetry.tracing.spans import End, SpanOutcome, TraceContext
from baton.telemetry.tracing.tracer import NO_TRACER, Received, Tracer, new_span_id, new_trace_id

MAX_LINKS = 128  # default limit of links per span in OpenTelemetry's SDKs

# Returns the parent context of a request's spans on this node; None if it is not traced.
ContextOf = Callable[[RequestId], TraceContext | None]


class Stopwatch:
    """Measures how much a sum of durations grows."""

    def __init__(self, read_s: Callable[[], float]) -> None:
        self._read_s = read_s
        self._last_s = 0.0

    def lap_s(self) -> float:
        """Return the growth since the last call."""
        last_s, self._last_s = self._last_s, self._read_s()
        return self._last_s - last_s


class StepTracing(StepObserver):
    """Records the work of a sample of the engine's steps, and the times of their phases."""

    def __init__(
        self,
        tracer: Tracer,
        facts: NodeFacts,
        ratio: float,
        context_of: ContextOf,
        collectives_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._tracer = tracer
        self._collectives = Stopwatch(collectives_s)
        self._facts = facts
        self._ratio = ratio
        self._context_of = context_of
        self._number = 0
        self._requests: list[TraceContext] | None = None  # of the current step, if it is traced

    def note_plan(self, plan: Plan, now_s: float) -> None:
        self._number += plan.concerns_runner
        self._requests = None
        if plan.num_scheduled_tokens and random.random() < self._ratio:
            # Contexts are read before the pass: a request that ends during it loses its context.
            found = [self._context_of(request_id) for request_id in plan.num_scheduled_tokens]
            self._requests = [context for context in found if context is not None]
            self._collectives.lap_s()

    def note_end(self, step: StepRecord) -> None:
        if self._requests is not None:
            self._tracer.take(self._timeline(step, self._requests))

    def _timeline(self, step: StepRecord, requests: list[TraceContext]) -> StepTimeline:
        plan = step.plan
        return StepTimeline(
            context=TraceContext(new_trace_id(), new_span_id()),
            facts=self._facts,
            times_s=step.times_s,
            number=self._number,
            num_rows=len(plan.num_scheduled_tokens),
            num_prefill_tokens=plan.num_prompt_tokens,
            num_decode_tokens=sum(plan.num_scheduled_tokens.values()) - plan.num_prompt_tokens,
            requests=tuple(requests[:MAX_LINKS]),
            num_links_left_out=max(0, len(requests) - MAX_LINKS),
            collectives_s=self._collectives.lap_s(),
        )


class NodeTracing(StepObserver):
    """Records the timelines of a node's calls from its servicers and its engine."""

    def __init__(
        self,
        tracer: Tracer,
        facts: NodeFacts,
        step_ratio: float = 0.0,
        collectives_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`collectives_s` returns how long passes have exchanged numbers between processes."""
        self._tracer = tracer
        self._collectives_s = collectives_s
        self._collectives = Stopwatch(collectives_s)
        self._facts = facts
        self._step_ratio = step_ratio
        self.num_steps = 0
        # From a call's start until its timeline is complete. Threads add and remove single keys.
        self._timelines: dict[RequestId, NodeTimeline] = {}
        self._puller_by_handoff: dict[HandoffId, NodeTimeline] = {}  # likewise
        self._loads: dict[LoadId, KvLoad] = {}  # in progress; used on the engine's thread only
        self._computing: dict[RequestId, NodeTimeline] = {}  # used on the engine's thread only

    @property
    def num_lost(self) -> int:
        return self._tracer.num_lost

    def step_observers(self) -> tuple[StepObserver, ...]:
        """Return the observers that the engine needs for what is traced."""
        if not self._tracer.is_on:
            return ()
        if not self._step_ratio:
            return (self,)
        steps = StepTracing(
            self._tracer, self._facts, self._step_ratio, self.context_of, self._collectives_s
        )
        return self, steps

    def context_of(self, request_id: RequestId) -> TraceContext | None:
        """Return the trace context of a request in flight, or None if it is not traced."""
        timeline = self._timelines.get(request_id)
        return None if timeline is None else timeline.context

    def handoff_context(self, handoff_id: HandoffId) -> TraceContext | None:
        """Return the trace context of a hand-off's request, or None if it is not traced."""
        return self.context_of(node_request_id(handoff_id))

    # --- gRPC's thread --------------------------------------------------------------------

    @contextmanager
    def record_call(
        self, context: CallContext, kind: LegKind, request: EngineRequest
    ) -> Iterator[NodeTimeline | None]:
        """Record a leg until the block ends. Yields None if it is not traced."""
        timeline = self._begin(context.metadata, kind, request)
        if timeline is None:
            yield None
            return
        request_id = request.request_id
        self._timelines[request_id] = timeline
        end = End(request.arrival_s, SpanOutcome.FAILED)
        try:
            yield timeline
            end = timeline.failure or _ok()
        except BaseException as error:
            end = (
                _ok()
                if timeline.is_finished
                else end_of(error, is_late=is_late(context, request.arrival_s))
            )
            raise
        finally:
            if timeline.starts:
                timeline.num_steps = self.num_steps - timeline.starts[0].step
            if timeline.note_end(end):
                self._close(request_id, timeline)

    def _begin(
        self, metadata: Received, kind: LegKind, request: EngineRequest
    ) -> NodeTimeline | None:
        parent = self._tracer.extract_context(metadata)
        if parent is None or not parent.is_sampled:
            return None
        push = dict(metadata).get(names.KV_PUSH_SPAN)
        push_id = _span_id(push) if isinstance(push, str) else None
        attempt = handoff_id_of(request.request_id).attempt
        name = leg_name(kind, request.task)
        return NodeTimeline(
            parent, self._facts, name, attempt, push_id, request.arrival_s, request.media
        )

    # --- The engine's thread ----------------------------------------------------------------

    def note_plan(self, plan: Plan, now_s: float) -> None:
        self.num_steps += plan.concerns_runner
        if self._timelines:
            self._note_orders(plan.kv_orders)
            self._note_loads(plan.kv_orders.external, now_s)
        for request_id in plan.dropped:
            self._note_dropped(request_id, now_s)
        for row in plan.started:
            self._note_started(row, now_s)

    def note_encoded(self, plan: Plan, encode_s: Mapping[RequestId, float], began_s: float) -> None:
        for request_id, duration_s in encode_s.items():
            timeline = self._timelines.get(request_id)
            if timeline is not None:
                sources = plan.media.encoded[request_id]  # without those read from the KV cache
                digests = frozenset(each.digest for each in sources if isinstance(each, Picture))
                timeline.encodings.append(Encoding(began_s, began_s + duration_s, digests))

    def note_pass(self, plan: Plan, began_s: float, ended_s: float) -> None:
        collectives_s = self._collectives.lap_s()
        for request_id, timeline in list(self._computing.items()):
            num_tokens = plan.num_scheduled_tokens.get(request_id)
            if not num_tokens:
                continue
            if timeline.note_chunk(PrefillChunk(began_s, ended_s, num_tokens, collectives_s)):
                del self._computing[request_id]

    def note_end(self, step: StepRecord) -> None:
        for record in step.transfers:
            self._note_record(record)
        self._note_loaded(step.reports.external, polled_s=step.times_s[4])

    def _note_orders(self, orders: KvOrders) -> None:
        for receive in orders.receives:
            puller = self._timelines.get(RequestId(receive.request_id)) if receive.names else None
            if puller is not None:
                self._puller_by_handoff[receive.handoff_id] = puller
        ids = [order.handoff_id for order in orders.receives]
        ids += [order.handoff_id for order in orders.sends]
        ids += [order.handoff_id for order in orders.layer_sends]
        for handoff_id in ids:
            timeline = self._timelines.get(node_request_id(handoff_id))
            if timeline is not None:
                timeline.begin_transfer()

    def _note_loads(self, orders: ExternalOrders, now_s: float) -> None:
        for order in orders.loads:
            timeline = self._timelines.get(RequestId(order.request_id))
            if timeline is not None:
                load = self._loads[order.load_id] = KvLoad(now_s, len(order.block_ids))
                timeline.loads.append(load)

    def _note_loaded(self, reports: ExternalReports, polled_s: float) -> None:
        for loaded in reports.loaded:
            load = self._loads.pop(loaded.load_id, None)
            if load is not None:
                load.sources, load.ended_s = loaded.sources, polled_s

    def _note_record(self, record: TransferRecord) -> None:
        puller = self._puller_by_handoff.pop(record.handoff_id, None)
        if puller is not None:
            puller.pulls.append(record)
            return
        request_id = node_request_id(record.handoff_id)
        timeline = self._timelines.get(request_id)
        if timeline is not None and timeline.note_record(record):
            self._close(request_id, timeline)

    def _note_dropped(self, request_id: RequestId, now_s: float) -> None:
        self._computing.pop(request_id, None)
        timeline = self._timelines.get(request_id)
        if timeline is not None:
            timeline.dropped_s.append(now_s)

    def _note_started(self, row: PlanRow, now_s: float) -> None:
        timeline = self._timelines.get(row.request_id)
        if timeline is None:
            return
        num_missing = len(row.token_ids) - row.num_computed_tokens
        start = Start(now_s, row.num_computed_tokens, num_missing, self.num_steps)
        timeline.starts.append(start)
        # A request whose KV was received computes no prompt: only its newest token is missing.
        if num_missing > 1 or timeline.record is None:
            timeline.num_missing_tokens = num_missing
            self._computing[row.request_id] = timeline

    # --- Both ---------------------------------------------------------------------------------

    def _close(self, request_id: RequestId, timeline: NodeTimeline) -> None:
        self._timelines.pop(request_id, None)
        self._tracer.take(timeline)


def _span_id(written: str) -> int | None:
    try:
        return int(written, 16) or None
    except ValueError:
        return None


def _ok() -> End:
    return End(time.monotonic(), rpc_status="OK")


NO_TRACING = NodeTracing(NO_TRACER, NodeFacts("", "", ""))
