"""Trace recording of a node's calls.

The recorders wrap the engine's runner and KV worker only if tracing or metrics are enabled, and
record a request only if it is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from engine.core import EngineCore
from engine.plan import KvWorker, Plan, PlanRow, Runner, RunResult
from engine.request import EngineRequest, FinishReason, Output, RequestId
from engine.scheduler.scheduler import Scheduler
from kv_transfer.records import TransferRecord
from kv_transfer.types import HandoffId, KvOrders, KvReports
from node.call_streams import CallContext
from node.counting_runner import CountedRunner
from node.step_tracing import StepTracing
from rpc.call_outcome import end_of, is_late
from rpc.messages.sequences import node_request_id
from telemetry import names
from telemetry.metrics.instruments import NodeMetrics
from telemetry.tracing.node_timeline import NodeFacts, NodeTimeline, PrefillChunk, Start
from telemetry.tracing.spans import End, SpanOutcome, TraceContext
from telemetry.tracing.tracer import NO_TRACER, Received, Tracer

FAILED = {
    FinishReason.ERROR: (SpanOutcome.FAILED, "GENERATION_FAILED", "INTERNAL"),
    FinishReason.ABORT: (SpanOutcome.CANCELLED, "", "CANCELLED"),
}


class RecordingKvWorker(KvWorker, Protocol):
    """The engine's KvWorker, with records of its transfers."""

    def take_records(self) -> tuple[TransferRecord, ...]: ...


class CallTrace:
    """Output recorder that records nothing, for calls that are not traced."""

    def record_output(self, output: Output) -> None:
        """Record an output. Only the first and the last output of a call are required."""


UNTRACED_CALL = CallTrace()


class RecordedCall(CallTrace):
    def __init__(self, timeline: NodeTimeline) -> None:
        self._timeline = timeline
        self.failed: End | None = None
        self.is_finished = False

    def record_output(self, output: Output) -> None:
        if self._timeline.first_output_s is None:
            self._timeline.first_output_s = time.monotonic()
            self._timeline.num_given_before = output.first_index
        self._timeline.num_output_tokens = output.first_index + len(output.token_ids)
        if output.finish_reason in FAILED:
            outcome, kind, code = FAILED[output.finish_reason]
            reason = "" if output.failure is None else output.failure.reason
            self.failed = End(time.monotonic(), outcome, kind, reason, code)
        elif output.finish_reason not in (None, FinishReason.HANDED_OFF):
            self.is_finished = True


class NodeTracing:
    def __init__(
        self,
        tracer: Tracer,
        facts: NodeFacts,
        metrics: NodeMetrics | None = None,
        step_ratio: float = 0.0,
    ) -> None:
        self._tracer = tracer
        self._facts = facts
        self.metrics = metrics
        self._step_ratio = step_ratio
        self.num_steps = 0
        # From a call's start until its timeline is complete. Threads add and remove single keys.
        self._timelines: dict[RequestId, NodeTimeline] = {}
        self._computing: dict[RequestId, NodeTimeline] = {}  # used on the engine's thread only

    @property
    def num_lost(self) -> int:
        return self._tracer.num_lost

    def wrap_runner(self, runner: Runner) -> Runner:
        if self.metrics is not None:
            runner = CountedRunner(runner, self.metrics)
        return TracedRunner(runner, self) if self._tracer.is_on else runner

    def wrap_kv_worker(self, worker: RecordingKvWorker) -> RecordingKvWorker:
        is_on = self._tracer.is_on or self.metrics is not None
        return TracedKvWorker(worker, self) if is_on else worker

    def build_core(self, scheduler: Scheduler, runner: Runner, kv_worker: KvWorker) -> EngineCore:
        """Return an EngineCore, with step tracing only if it is enabled."""
        if not self._tracer.is_on or not self._step_ratio:
            return EngineCore(scheduler, runner, kv_worker)
        steps = StepTracing(self._tracer, self._facts, self._step_ratio, self.context_of)
        return steps.build_core(scheduler, runner, kv_worker)

    def context_of(self, request_id: RequestId) -> TraceContext | None:
        """Return the trace context of a request in flight, or None if it is not traced."""
        timeline = self._timelines.get(request_id)
        return None if timeline is None else timeline.context

    # --- gRPC's thread --------------------------------------------------------------------

    @contextmanager
    def record_call(
        self, context: CallContext, handoff_id: HandoffId, spec: EngineRequest
    ) -> Iterator[CallTrace]:
        """Record a router's call until the block ends."""
        timeline = self._begin(context.metadata, handoff_id, spec.arrival_s)
        if timeline is None:
            yield UNTRACED_CALL
            return
        request_id = node_request_id(handoff_id)
        trace = RecordedCall(timeline)
        self._timelines[request_id] = timeline
        end = End(spec.arrival_s, SpanOutcome.FAILED)
        try:
            yield trace
            end = trace.failed or _ok()
        except BaseException as error:
            end = (
                _ok()
                if trace.is_finished
                else end_of(error, is_late=is_late(context, spec.arrival_s))
            )
            raise
        finally:
            if timeline.starts:
                timeline.num_steps = self.num_steps - timeline.starts[0].step
            if timeline.note_end(end):
                self._close(request_id, timeline)

    def _begin(
        self, metadata: Received, handoff_id: HandoffId, arrival_s: float
    ) -> NodeTimeline | None:
        parent = self._tracer.extract_context(metadata)
        if parent is None or not parent.is_sampled:
            return None
        push = dict(metadata).get(names.KV_PUSH_SPAN)
        push_id = _span_id(push) if isinstance(push, str) else None
        return NodeTimeline(parent, self._facts, handoff_id.attempt, push_id, arrival_s)

    # --- The engine's thread ----------------------------------------------------------------

    def record_run(self, plan: Plan, run: Callable[[Plan], RunResult]) -> RunResult:
        """Run a plan, and record the requests that it starts, computes and drops."""
        now_s = time.monotonic()
        if not plan.is_retry:
            self.num_steps += 1
            for request_id in plan.dropped:
                self._note_dropped(request_id, now_s)
            for row in plan.started:
                self._note_started(row, now_s)
        if not self._computing:
            return run(plan)
        result = run(plan)
        ended_s = time.monotonic()
        for request_id, timeline in list(self._computing.items()):
            num_tokens = plan.num_scheduled_tokens.get(request_id)
            if num_tokens and timeline.note_chunk(PrefillChunk(now_s, ended_s, num_tokens)):
                del self._computing[request_id]
        return result

    def note_orders(self, orders: KvOrders) -> None:
        if not self._timelines:
            return
        ids = [order.handoff_id for order in orders.receives]
        ids += [order.handoff_id for order in orders.sends]
        ids += [order.handoff_id for order in orders.layer_sends]
        for handoff_id in ids:
            timeline = self._timelines.get(node_request_id(handoff_id))
            if timeline is not None:
                timeline.begin_transfer()

    def note_record(self, record: TransferRecord) -> None:
        request_id = node_request_id(record.handoff_id)
        timeline = self._timelines.get(request_id)
        if self.metrics is not None:
            self.metrics.take(record, None if timeline is None else timeline.parent)
        if timeline is not None and timeline.note_record(record):
            self._close(request_id, timeline)

    def _note_dropped(self, request_id: RequestId, now_s: float) -> None:
        timeline = self._timelines.get(request_id)
        if timeline is not None:
            timeline.dropped_s.append(now_s)
            self._computing.pop(request_id, None)

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


class TracedRunner:
    def __init__(self, runner: Runner, tracing: NodeTracing) -> None:
        self._runner = runner
        self._tracing = tracing

    def run(self, plan: Plan) -> RunResult:
        return self._tracing.record_run(plan, self._runner.run)


class TracedKvWorker:
    def __init__(self, worker: RecordingKvWorker, tracing: NodeTracing) -> None:
        self._worker = worker
        self._tracing = tracing

    def start(self, orders: KvOrders, now: float) -> None:
        self._tracing.note_orders(orders)
        self._worker.start(orders, now)

    def poll(self, now: float) -> KvReports:
        return self._worker.poll(now)

    def next_poll_s(self, now: float) -> float | None:
        return self._worker.next_poll_s(now)

    def take_records(self) -> tuple[TransferRecord, ...]:
        records = self._worker.take_records()
        for record in records:
            self._tracing.note_record(record)
        return records


def _span_id(written: str) -> int | None:
    try:
        return int(written, 16) or None
    except ValueError:
        return None


def _ok() -> End:
    return End(time.monotonic(), rpc_status="OK")


NO_TRACING = NodeTracing(NO_TRACER, NodeFacts("", "", ""))
