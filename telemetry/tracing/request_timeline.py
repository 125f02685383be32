"""Timeline of a request on the router, and the spans made from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.core.legs import LegKind
from baton.core.output import Finish
from baton.core.request import Task, TaskOutput
from baton.telemetry import names
from baton.telemetry.tracing.spans import (
    AttributeValue,
    End,
    Span,
    SpanKind,
    SpanMaker,
    SpanOutcome,
    SpanStatus,
    ToUnixNs,
    TraceContext,
)

ROLE = "router"
GENERATE_METHOD = "baton.v1.InferenceService/Generate"
LEG_METHOD = "baton.v1.LegService/Serve"
COMPLETIONS = "/v1/completions"


def leg_name(kind: LegKind, task: Task) -> str:
    """Return the name of a leg's spans on the router and the node: what the node does."""
    return names.PREFETCH if task.output is TaskOutput.KV else kind.value


@dataclass(slots=True)
class NodeRpcTimeline:
    name: str  # that `leg_name` returns
    span_id: int
    node_id: str
    incarnation: str
    address: str
    began_s: float
    end: End | None = None

    @property
    def has_failed(self) -> bool:
        return self.end is not None and self.end.outcome.status is SpanStatus.ERROR


@dataclass(slots=True)
class AttemptTimeline:
    """One attempt. It begins at admission, or with the failure of the previous attempt."""

    number: int
    num_prior_tokens: int
    span_id: int  # of its retry or migrate span; unused by the first attempt
    kv_push_span_id: int
    chosen_s: float | None = None
    choice: Mapping[str, AttributeValue | None] = field(default_factory=dict)  # its attributes
    legs: list[NodeRpcTimeline] = field(default_factory=list)
    end: End | None = None

    @property
    def ended_by(self) -> list[NodeRpcTimeline]:
        """Legs that ended the attempt: the failed ones, or all if none has failed."""
        return [leg for leg in self.legs if leg.has_failed] or self.legs

    @property
    def ended_s(self) -> float | None:
        """End of the attempt: the first failure or, without one, the end of the last leg."""
        ends = [leg.end.at_s for leg in self.ended_by if leg.end is not None]
        if not ends:
            return None if self.end is None else self.end.at_s
        return min(ends) if self.ended_by[0].has_failed else max(ends)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on whether a request caused the failure of its attempt on a node."""

    at_s: float
    verdict: str  # bystander, suspect or poison
    address: str


@dataclass(slots=True)
class ImageWork:
    """Work on the images of a request, before it is admitted."""

    name: str  # fetch_images or prepare_images
    began_s: float
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    end: End | None = None


@dataclass(slots=True)
class RequestTimeline:
    request_id: str
    context: TraceContext  # of the generate span
    parent_id: int | None
    received_s: float
    request_attributes: dict[str, AttributeValue] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    documents_read_s: float | None = None  # None: there are none
    image_work: list[ImageWork] = field(default_factory=list)
    tokenized_s: float | None = None
    queue_position: int = 0
    admitted_s: float | None = None
    vllm_legs: list[VllmLegTimeline] = field(default_factory=list)
    tries: list[AttemptTimeline] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    num_output_tokens: int = 0  # sent to the client, each counted once
    first_token_s: float | None = None
    finish: Finish | None = None  # of a complete answer
    end: End | None = None

    @property
    def was_dispatched(self) -> bool:
        return any(attempt.legs for attempt in self.tries)

    @property
    def served(self) -> str:
        """Place where the prompt was computed (remote, local), or migrated; empty: no answer."""
        if self.finish is None:
            return ""
        if any(attempt.num_prior_tokens for attempt in self.tries):
            return "migrated"
        return "remote" if self.finish.served.is_prefill_remote else "local"

    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]:
        """Return the spans of an ended request."""
        return list(_RequestSpans(self, to_unix_ns).spans())


class _RequestSpans:
    def __init__(self, timeline: RequestTimeline, to_unix_ns: ToUnixNs) -> None:
        self._timeline = timeline
        self._root_id = timeline.context.span_id
        self._make = SpanMaker(timeline.context.trace_id, ROLE, to_unix_ns)
        self._end = timeline.end or End(timeline.received_s, SpanOutcome.FAILED)

    def spans(self) -> Iterator[Span]:
        yield self._generate()
        admit = self._admit()
        yield admit
        for work in self._timeline.image_work:
            end = work.end or self._end
            yield self._make.span(work.name, admit.span_id, work.began_s, end, work.attributes)
        for leg in self._timeline.vllm_legs:
            yield vllm_leg_span(leg, self._make, self._root_id, self._timeline.num_prompt_tokens)
        previous: AttemptTimeline | None = None
        for attempt in self._timeline.tries:
            yield from self._attempt(attempt, previous)
            previous = attempt

    def _generate(self) -> Span:
        timeline = self._timeline
        first_s = timeline.first_token_s
        attributes = {
            names.PROVIDER: "baton",
            names.RESPONSE_ID: timeline.request_id,
            names.INPUT_TOKENS: timeline.num_prompt_tokens,
            names.OUTPUT_TOKENS: timeline.num_output_tokens,
            names.TIME_TO_FIRST_TOKEN: None if first_s is None else first_s - timeline.received_s,
            names.ATTEMPTS: len(timeline.tries),
        }
        events = [] if first_s is None else [self._make.event(names.FIRST_TOKEN, first_s)]
        for judgement in timeline.judgements:
            verdict = {names.VERDICT: judgement.verdict, names.SERVER_ADDRESS: judgement.address}
            events.append(self._make.event(names.JUDGED, judgement.at_s, **verdict))
        return self._make.span(
            names.GENERATE,
            timeline.parent_id,
            timeline.received_s,
            self._end,
            {
                **timeline.request_attributes,
                **attributes,
                **self._finish_attributes(),
                **_rpc(GENERATE_METHOD, self._end),
            },
            span_id=self._root_id,
            kind=SpanKind.SERVER,
            events=tuple(events),
        )

    def _finish_attributes(self) -> dict[str, AttributeValue | None]:
        finish = self._timeline.finish
        if finish is None:
            return {}
        return {
            names.FINISH_REASONS: (finish.reason,),
            names.SERVED: self._timeline.served,
            names.SERVED_REASON: finish.served.prefill_reason or None,
            names.KV_BYTES: finish.served.kv_bytes,
            names.KV_BLOCKS: finish.served.kv_blocks,
            names.KV_TRANSPORT: finish.served.kv_transport or None,
            names.KV_CONVERSION: finish.served.kv_conversion or None,
        }

    def _admit(self) -> Span:
        timeline = self._timeline
        end = self._end if timeline.admitted_s is None else End(timeline.admitted_s)
        read_s = timeline.tokenized_s
        attributes: dict[str, AttributeValue | None] = {
            names.QUEUE_POSITION: timeline.queue_position,
            names.QUEUE_WAIT: None if read_s is None else end.at_s - read_s,
        }
        times = {names.DOCUMENTS_READ: timeline.documents_read_s, names.TOKENIZED: read_s}
        events = (self._make.event(name, at_s) for name, at_s in times.items() if at_s is not None)
        return self._make.span(
            names.ADMIT, self._root_id, timeline.received_s, end, attributes, events=tuple(events)
        )

    def _attempt(
        self, attempt: AttemptTimeline, previous: AttemptTimeline | None
    ) -> Iterator[Span]:
        """Yield the spans of an attempt. They are contiguous: each instant belongs to one."""
        if previous is None:
            began_s, failed, parent_id = self._first_attempt_s(), [], self._root_id
        else:
            began_s, failed, parent_id = previous.ended_s, previous.ended_by, attempt.span_id
        began_s = self._end.at_s if began_s is None else began_s
        if previous is not None:
            yield self._retry(attempt, began_s, failed)
        yield self._route(attempt, began_s, parent_id)
        for leg in attempt.legs:
            yield self._leg(attempt, leg, parent_id, [other.span_id for other in failed])

    def _first_attempt_s(self) -> float | None:
        """Return the time of admission, or that at which vLLM servers had been asked."""
        ends = [leg.end.at_s for leg in self._timeline.vllm_legs if leg.end is not None]
        return max(ends, default=self._timeline.admitted_s)

    def _retry(
        self, attempt: AttemptTimeline, began_s: float, failed: list[NodeRpcTimeline]
    ) -> Span:
        """The retry or migrate span, linked to the failed legs."""
        events = tuple(
            self._make.event(
                names.LEG_FAILED,
                leg.end.at_s,
                **{
                    names.NODE: leg.node_id,
                    names.ERROR_TYPE: leg.end.error_type,
                    names.ERROR_MESSAGE: leg.end.message,
                },
            )
            for leg in failed
            if leg.end is not None and leg.has_failed
        )
        attributes: dict[str, AttributeValue | None] = {
            names.ATTEMPT: attempt.number,
            names.PRIOR_TOKENS: attempt.num_prior_tokens,
        }
        return self._make.span(
            names.MIGRATE if attempt.num_prior_tokens else names.RETRY,
            self._root_id,
            began_s,
            attempt.end or self._end,
            attributes,
            span_id=attempt.span_id,
            events=events,
            links=[leg.span_id for leg in failed],
        )

    def _route(self, attempt: AttemptTimeline, began_s: float, parent_id: int) -> Span:
        """The route span, up to the first call of a node; its event is the time of the choice."""
        chosen_s, end = attempt.chosen_s, attempt.end or self._end
        if attempt.legs:
            end = End(min(leg.began_s for leg in attempt.legs))
        events = () if chosen_s is None else (self._make.event(names.CHOSEN, chosen_s),)
        attributes = {names.ATTEMPT: attempt.number, **attempt.choice}
        return self._make.span(names.ROUTE, parent_id, began_s, end, attributes, events=events)

    def _leg(
        self, attempt: AttemptTimeline, leg: NodeRpcTimeline, parent_id: int, links: list[int]
    ) -> Span:
        end = leg.end or self._end
        attributes = {
            names.NODE: leg.node_id,
            names.INCARNATION: leg.incarnation,
            names.SERVER_ADDRESS: leg.address,
            names.ATTEMPT: attempt.number,
            **_rpc(LEG_METHOD, end),
        }
        return self._make.span(
            leg.name,
            parent_id,
            leg.began_s,
            end,
            attributes,
            span_id=leg.span_id,
            kind=SpanKind.CLIENT,
            links=links,
        )


def _rpc(method: str, end: End) -> dict[str, AttributeValue | None]:
    return {
        names.RPC_SYSTEM: "grpc",
        names.RPC_METHOD: method,
        names.RPC_STATUS: end.rpc_status or None,
    }


@dataclass(slots=True)
class VllmLegTimeline:
    """Call to a vLLM server, before the first attempt."""

    span_id: int
    address: str
    began_s: float
    end: End | None = None


def vllm_leg_span(
    leg: VllmLegTimeline, make: SpanMaker, parent_id: int, num_tokens: int | None
) -> Span:
    """Return the span of a call. The server's own spans are below it."""
    attributes = {
        names.PROVIDER: "vllm",
        names.INPUT_TOKENS: num_tokens,
        names.SERVER_ADDRESS: leg.address,
        names.HTTP_METHOD: "POST",
        names.HTTP_PATH: COMPLETIONS,
    }
    return make.span(
        names.PREFILL,
        parent_id,
        leg.began_s,
        leg.end or End(leg.began_s, SpanOutcome.FAILED),
        attributes,
        span_id=leg.span_id,
        kind=SpanKind.CLIENT,
    )
