"""A request's way through the router as times and facts, and the spans that tell of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from telemetry import names
from telemetry.spans import (
    AttributeValue,
    End,
    Outcome,
    Span,
    SpanKind,
    SpanMaker,
    SpanStatus,
    ToUnixNs,
    TraceContext,
)

ROLE = "router"
GENERATE_METHOD = "baton.v1.InferenceService/Generate"
LEG_METHODS = {
    names.PREFILL: "baton.v1.PrefillService/Prefill",
    names.DECODE: "baton.v1.DecodeService/Decode",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which nodes were chosen for a try, from how many, and why."""

    at_s: float
    policy: str
    decode_node: str
    prefill_node: str  # empty: decode computes the prompt
    reason: str
    num_decode_candidates: int
    num_prefill_candidates: int
    num_predicted_hit_tokens: int


@dataclass(slots=True)
class LegTimeline:
    """One call to a node."""

    name: str  # prefill or decode
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
class TryTimeline:
    """It begins when its turn has come, or with the failure of the try before it."""

    number: int
    num_prior_tokens: int
    span_id: int  # of its retry or migrate; unused by the first
    kv_push_span_id: int
    choice: Choice | None = None
    legs: list[LegTimeline] = field(default_factory=list)
    end: End | None = None

    @property
    def blamed(self) -> list[LegTimeline]:
        """Why there is another try: the legs that failed, or all when none said so."""
        return [leg for leg in self.legs if leg.has_failed] or self.legs

    @property
    def broke_off_s(self) -> float | None:
        """With the first failure, or with the last leg that ended without a word."""
        ends = [leg.end.at_s for leg in self.blamed if leg.end is not None]
        if not ends:
            return None if self.end is None else self.end.at_s
        return min(ends) if self.blamed[0].has_failed else max(ends)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the answer took, when it came to its end."""

    finish_reason: str
    served: str  # remote, local or migrated
    served_reason: str
    kv_bytes: int
    kv_blocks: int
    kv_transport: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a request is at fault for the end of a try on a node."""

    at_s: float
    verdict: str  # bystander, suspect or poison
    address: str


@dataclass(slots=True)
class RequestTimeline:
    request_id: str
    context: TraceContext  # of the generate span
    parent_id: int | None
    received_s: float
    asked: dict[str, AttributeValue] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    tokenized_s: float | None = None
    queue_position: int = 0
    admitted_s: float | None = None
    tries: list[TryTimeline] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    num_output_tokens: int = 0  # passed on to the client, each once
    first_token_s: float | None = None
    usage: Usage | None = None
    end: End | None = None

    @property
    def was_dispatched(self) -> bool:
        """Whether any node was asked."""
        return any(one.legs for one in self.tries)

    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]:
        """Once it has ended."""
        return list(_Telling(self, to_unix_ns).spans())


class _Telling:
    def __init__(self, timeline: RequestTimeline, to_unix_ns: ToUnixNs) -> None:
        self._timeline = timeline
        self._root_id = timeline.context.span_id
        self._make = SpanMaker(timeline.context.trace_id, to_unix_ns)
        self._end = timeline.end or End(timeline.received_s, Outcome.FAILED)

    def spans(self) -> Iterator[Span]:
        yield self._generate()
        yield self._admit()
        before: TryTimeline | None = None
        for one in self._timeline.tries:
            yield from self._try(one, before)
            before = one

    def _generate(self) -> Span:
        timeline, usage = self._timeline, self._timeline.usage
        first_s = timeline.first_token_s
        attributes = {
            names.ROLE: ROLE,
            names.PROVIDER: "baton",
            names.RESPONSE_ID: timeline.request_id,
            names.INPUT_TOKENS: timeline.num_prompt_tokens,
            names.OUTPUT_TOKENS: timeline.num_output_tokens,
            names.TIME_TO_FIRST_TOKEN: None if first_s is None else first_s - timeline.received_s,
            names.ATTEMPTS: len(timeline.tries),
        }
        events = [] if first_s is None else [self._make.event(names.FIRST_TOKEN, first_s)]
        for one in timeline.judgements:
            told = {names.VERDICT: one.verdict, names.SERVER_ADDRESS: one.address}
            events.append(self._make.event(names.JUDGED, one.at_s, **told))
        return self._make.span(
            names.GENERATE,
            timeline.parent_id,
            timeline.received_s,
            self._end,
            {**timeline.asked, **attributes, **_told(usage), **_rpc(GENERATE_METHOD, self._end)},
            span_id=self._root_id,
            kind=SpanKind.SERVER,
            events=tuple(events),
        )

    def _admit(self) -> Span:
        timeline = self._timeline
        end = self._end if timeline.admitted_s is None else End(timeline.admitted_s)
        read_s = timeline.tokenized_s
        attributes: dict[str, AttributeValue | None] = {
            names.ROLE: ROLE,
            names.QUEUE_POSITION: timeline.queue_position,
            names.QUEUE_WAIT: None if read_s is None else end.at_s - read_s,
        }
        events = () if read_s is None else (self._make.event(names.TOKENIZED, read_s),)
        return self._make.span(
            names.ADMIT, self._root_id, timeline.received_s, end, attributes, events=events
        )

    def _try(self, one: TryTimeline, before: TryTimeline | None) -> Iterator[Span]:
        """Its parts share their boundaries: each instant is some part's."""
        if before is None:
            began_s, failed, parent_id = self._timeline.admitted_s, [], self._root_id
        else:
            began_s, failed, parent_id = before.broke_off_s, before.blamed, one.span_id
        began_s = self._end.at_s if began_s is None else began_s
        if before is not None:
            yield self._again(one, began_s, failed)
        yield self._route(one, began_s, parent_id)
        for leg in one.legs:
            yield self._leg(one, leg, parent_id, [other.span_id for other in failed])

    def _again(self, one: TryTimeline, began_s: float, failed: list[LegTimeline]) -> Span:
        """Why there is another try, and what it goes on from."""
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
            names.ROLE: ROLE,
            names.ATTEMPT: one.number,
            names.PRIOR_TOKENS: one.num_prior_tokens,
        }
        return self._make.span(
            names.MIGRATE if one.num_prior_tokens else names.RETRY,
            self._root_id,
            began_s,
            one.end or self._end,
            attributes,
            span_id=one.span_id,
            events=events,
            links=[leg.span_id for leg in failed],
        )

    def _route(self, one: TryTimeline, began_s: float, parent_id: int) -> Span:
        """Until the first node is called; the event tells when the choice was made."""
        choice, end = one.choice, one.end or self._end
        if one.legs:
            end = End(min(leg.began_s for leg in one.legs))
        told = {} if choice is None else _why(choice)
        events = () if choice is None else (self._make.event(names.CHOSEN, choice.at_s),)
        attributes = {names.ROLE: ROLE, names.ATTEMPT: one.number, **told}
        return self._make.span(names.ROUTE, parent_id, began_s, end, attributes, events=events)

    def _leg(self, one: TryTimeline, leg: LegTimeline, parent_id: int, links: list[int]) -> Span:
        end = leg.end or self._end
        attributes = {
            names.ROLE: ROLE,
            names.NODE: leg.node_id,
            names.INCARNATION: leg.incarnation,
            names.SERVER_ADDRESS: leg.address,
            names.ATTEMPT: one.number,
            **_rpc(LEG_METHODS[leg.name], end),
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


def _why(choice: Choice) -> dict[str, AttributeValue | None]:
    return {
        names.POLICY: choice.policy,
        names.CANDIDATES_PREFILL: choice.num_prefill_candidates,
        names.CANDIDATES_DECODE: choice.num_decode_candidates,
        names.CHOSEN_PREFILL: choice.prefill_node or None,
        names.CHOSEN_DECODE: choice.decode_node,
        names.PREDICTED_HIT_TOKENS: choice.num_predicted_hit_tokens,
        names.ROUTE_REASON: choice.reason or None,
    }


def _told(usage: Usage | None) -> dict[str, AttributeValue | None]:
    if usage is None:
        return {}
    return {
        names.FINISH_REASONS: (usage.finish_reason,),
        names.SERVED: usage.served,
        names.SERVED_REASON: usage.served_reason or None,
        names.KV_BYTES: usage.kv_bytes,
        names.KV_BLOCKS: usage.kv_blocks,
        names.KV_TRANSPORT: usage.kv_transport or None,
    }
