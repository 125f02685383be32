"""Records the timeline of each request in the router, for its trace and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from baton.core.errors import InvalidRequest
from baton.core.output import Finish
from baton.router.routing.config import RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route
from baton.router.routing.served_models import Node
from baton.router.values import ChatPrompt, GenerateCall
from baton.rpc.status import end_of
from baton.telemetry import names
from baton.telemetry.logs import log_event
from baton.telemetry.metrics.instruments import RouterMetrics
from baton.telemetry.tracing.request_timeline import (
    AttemptTimeline,
    ImageWork,
    Judgement,
    NodeRpcTimeline,
    RequestTimeline,
    VllmLegTimeline,
)
from baton.telemetry.tracing.spans import (
    AttributeValue,
    End,
    Metadata,
    SpanOutcome,
    TraceContext,
)
from baton.telemetry.tracing.tracer import NO_TRACER, Received, Tracer, new_span_id, new_trace_id

LOG_LEVELS = {
    SpanOutcome.OK: logging.DEBUG,
    SpanOutcome.CANCELLED: logging.INFO,
    SpanOutcome.REFUSED: logging.INFO,
}

log = logging.getLogger(__name__)


class LegTrace:
    """Trace of one call to a node: the metadata to send, and whether the call has finished."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self.metadata = metadata
        self.is_finished = False

    def finished(self) -> None:
        """Mark the call as successful: later errors, such as of its cancellation, are ignored."""
        self.is_finished = True


class RequestTrace:
    """Trace interface; this base class records nothing, for requests that are not traced."""

    trace_id = ""
    traceparent = ""

    def note_call(self, call: GenerateCall) -> None: ...

    def note_documents_read(self) -> None: ...

    @contextmanager
    def image_work(self, name: str) -> Iterator[dict[str, AttributeValue]]:
        """Trace work on images, which ends with the block. Yields the attributes of its span."""
        yield {}

    def note_tokenized(self, num_tokens: int) -> None: ...

    def note_queued(self, num_ahead: int) -> None: ...

    def note_admitted(self) -> None: ...

    def note_attempt_began(self, number: int, num_prior_tokens: int) -> None: ...

    def note_routed(self, route: Route, policy: RoutingPolicy, table: NodeTable) -> None: ...

    def note_attempt_failed(self) -> None: ...

    def note_verdict(self, verdict: str, address: str) -> None:
        """Record the quarantine's verdict after an engine or a pass failed with this request."""

    def note_tokens(self, num_tokens: int) -> None:
        """Record tokens that are passed on to the client."""

    def note_completed(self, finish: Finish) -> None: ...

    @contextmanager
    def leg(self, name: str, node: Node) -> Iterator[LegTrace]:
        """Trace one call to a node, which ends with the block."""
        yield LegTrace()

    @contextmanager
    def vllm_leg(self, address: str) -> Iterator[LegTrace]:
        """Trace a prompt that a vLLM server computes, which ends with the block."""
        yield LegTrace()

    @contextmanager
    def ending(self, is_late: Callable[[], bool]) -> Iterator[None]:
        """Record the outcome of the request, which ends with the block."""
        yield


UNTRACED = RequestTrace()


class RecordedTrace(RequestTrace):
    """Records the timeline of a request and exports it at the end."""

    def __init__(
        self, timeline: RequestTimeline, tracer: Tracer, metrics: RouterMetrics | None
    ) -> None:
        self._timeline = timeline
        self._tracer = tracer
        self._metrics = metrics
        self.trace_id = timeline.context.trace_hex if timeline.context.is_sampled else ""
        self.traceparent = timeline.context.traceparent

    def note_call(self, call: GenerateCall) -> None:
        is_chat = isinstance(call.prompt, ChatPrompt)
        self._timeline.request_attributes |= {
            names.OPERATION: "chat" if is_chat else "text_completion",
            names.REQUEST_MODEL: call.model.name,
            names.MAX_TOKENS: call.sampling.max_tokens,
            names.TEMPERATURE: call.sampling.temperature,
            names.TOP_P: call.sampling.top_p,
        }
        adapter = call.model.adapter
        if adapter.id:
            self._timeline.request_attributes |= {
                names.ADAPTER: adapter.name,
                names.ADAPTER_ID: adapter.id,
            }

    @contextmanager
    def image_work(self, name: str) -> Iterator[dict[str, AttributeValue]]:
        work = ImageWork(name, time.monotonic())
        self._timeline.image_work.append(work)
        try:
            yield work.attributes
            work.end = End(time.monotonic())
        except BaseException as error:
            work.end = end_of(error, is_refused=self._is_refused(error))
            raise

    def note_documents_read(self) -> None:
        self._timeline.documents_read_s = time.monotonic()

    def note_tokenized(self, num_tokens: int) -> None:
        self._timeline.tokenized_s = time.monotonic()
        self._timeline.num_prompt_tokens = num_tokens

    def note_queued(self, num_ahead: int) -> None:
        self._timeline.queue_position = num_ahead

    def note_admitted(self) -> None:
        self._timeline.admitted_s = time.monotonic()

    def note_attempt_began(self, number: int, num_prior_tokens: int) -> None:
        attempt = AttemptTimeline(number, num_prior_tokens, new_span_id(), new_span_id())
        self._timeline.tries.append(attempt)

    def note_routed(self, route: Route, policy: RoutingPolicy, table: NodeTable) -> None:
        num_tokens, model = self._timeline.num_prompt_tokens or 0, route.last.node.card.model
        groups = [group for group in table.groups() if group.model == model]
        self._timeline.request_attributes.setdefault(names.RESPONSE_MODEL, model)
        attempt, holder = self._timeline.tries[-1], route.holder
        attempt.chosen_s = time.monotonic()
        attempt.choice = {
            names.POLICY: policy.value,
            names.CANDIDATES_PREFILL: sum(len(group.prefills) for group in groups),
            names.CANDIDATES_DECODE: sum(len(group.decodes) for group in groups),
            names.CHOSEN_PREFILL: route.first.node.card.node_id if route.is_split else None,
            names.CHOSEN_DECODE: route.last.node.card.node_id,
            names.CHOSEN_HOLDER: None if holder is None else holder.node.card.node_id,
            names.PROMISED_TOKENS: None if holder is None else holder.num_tokens or None,
            names.PREDICTED_HIT_TOKENS: max(0, num_tokens - route.num_missing_tokens),
            names.ROUTE_REASON: route.local_reason or None,
        }

    def note_attempt_failed(self) -> None:
        self._timeline.tries[-1].end = End(time.monotonic(), SpanOutcome.FAILED, "NODE_FAILED")

    def note_verdict(self, verdict: str, address: str) -> None:
        self._timeline.judgements.append(Judgement(time.monotonic(), verdict, address))

    def note_tokens(self, num_tokens: int) -> None:
        timeline = self._timeline
        timeline.num_output_tokens += num_tokens
        if timeline.first_token_s is None:
            timeline.first_token_s = time.monotonic()

    def note_completed(self, finish: Finish) -> None:
        self._timeline.finish = finish

    @contextmanager
    def leg(self, name: str, node: Node) -> Iterator[LegTrace]:
        attempt = self._timeline.tries[-1]
        leg = NodeRpcTimeline(
            name=name,
            span_id=new_span_id(),
            node_id=node.card.node_id,
            incarnation=node.card.incarnation,
            address=node.address,
            began_s=time.monotonic(),
        )
        attempt.legs.append(leg)
        parent = self._timeline.context
        context = TraceContext(parent.trace_id, leg.span_id, parent.is_sampled)
        push = f"{attempt.kv_push_span_id:016x}"
        leg_trace = LegTrace(((names.TRACEPARENT, context.traceparent), (names.KV_PUSH_SPAN, push)))
        try:
            yield leg_trace
            leg.end = _ok()
        except BaseException as error:
            leg.end = _ok() if leg_trace.is_finished else end_of(error)
            raise

    @contextmanager
    def vllm_leg(self, address: str) -> Iterator[LegTrace]:
        leg = VllmLegTimeline(new_span_id(), address, time.monotonic())
        self._timeline.vllm_legs.append(leg)
        context = replace(self._timeline.context, span_id=leg.span_id)
        try:
            yield LegTrace(((names.TRACEPARENT, context.traceparent),))
            leg.end = End(time.monotonic())
        except BaseException as error:
            leg.end = end_of(error)
            raise

    @contextmanager
    def ending(self, is_late: Callable[[], bool]) -> Iterator[None]:
        end = End(time.monotonic())
        try:
            yield
            end = _ok()
        except BaseException as error:
            end = end_of(error, is_late=is_late(), is_refused=self._is_refused(error))
            raise
        finally:
            self._timeline.end = end
            log_end(self._timeline, self.trace_id)
            if self._metrics is not None:
                self._metrics.take(self._timeline)
            if self._timeline.context.is_sampled:
                self._tracer.take(self._timeline)

    def _is_refused(self, error: BaseException) -> bool:
        """Return whether the request was refused, by the router or as invalid by a node."""
        is_invalid = isinstance(error, InvalidRequest) and not self._timeline.num_output_tokens
        return is_invalid or not self._timeline.was_dispatched


class Tracing:
    """Begins the traces of sampled requests. With metrics, all requests are counted."""

    def __init__(self, tracer: Tracer, metrics: RouterMetrics | None = None) -> None:
        self._tracer = tracer
        self._metrics = metrics

    def begin(self, metadata: Received | None, request_id: str, received_s: float) -> RequestTrace:
        if not self._tracer.is_on and self._metrics is None:
            return UNTRACED
        parent = self._tracer.extract_context(metadata or ())
        trace_id = new_trace_id() if parent is None else parent.trace_id
        is_sampled = self._tracer.draws(trace_id) if parent is None else parent.is_sampled
        if not is_sampled and self._metrics is None:
            return UNTRACED
        timeline = RequestTimeline(
            request_id,
            TraceContext(trace_id, new_span_id(), is_sampled),
            None if parent is None else parent.span_id,
            received_s,
        )
        return RecordedTrace(timeline, self._tracer, self._metrics)


def log_end(timeline: RequestTimeline, trace_id: str) -> None:
    """Log the end of a request; successful ones at debug level only."""
    end = timeline.end
    if end is None:
        return
    level = LOG_LEVELS.get(end.outcome, logging.WARNING)
    if not log.isEnabledFor(level):
        return
    first_s = timeline.first_token_s
    fields = {
        "request_id": timeline.request_id,
        "outcome": end.outcome.name.lower(),
        "error_type": end.error_type,
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_output_tokens": timeline.num_output_tokens,
        "served": timeline.served,
        "num_tries": len(timeline.tries),
        "first_token_s": None if first_s is None else round(first_s - timeline.received_s, 6),
        "duration_s": round(end.at_s - timeline.received_s, 6),
    }
    log_event(log, level, "request ended", fields, trace_id)


NO_REQUEST_TRACING = Tracing(NO_TRACER)


def _ok() -> End:
    return End(time.monotonic(), rpc_status="OK")
