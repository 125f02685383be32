"""Timeline of one engine step, and the span made from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from baton.telemetry import names
from baton.telemetry.tracing.node_timeline import NodeFacts
from baton.telemetry.tracing.spans import (
    AttributeValue,
    End,
    Span,
    SpanLink,
    SpanMaker,
    ToUnixNs,
    TraceContext,
)


@dataclass(frozen=True, slots=True)
class StepTimeline:
    context: TraceContext
    facts: NodeFacts
    times_s: tuple[float, ...]  # begin, and the end of each part of `names.STEP_PARTS`
    number: int
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    requests: tuple[TraceContext, ...]  # traced requests in the step, up to the limit of links
    num_links_left_out: int = 0
    collectives_s: float = 0.0  # of its pass; 0: the node is one process

    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]:
        """Return the span of an ended step."""
        span = SpanMaker(self.context.trace_id, self.facts.role, to_unix_ns).span(
            names.ENGINE_STEP,
            None,
            self.times_s[0],
            End(self.times_s[-1]),
            self._attributes(),
            span_id=self.context.span_id,
        )
        links = tuple(SpanLink(context.trace_id, context.span_id) for context in self.requests)
        return [replace(span, links=links)]

    def _attributes(self) -> dict[str, AttributeValue | None]:
        return {
            names.NODE: self.facts.node_id,
            names.INCARNATION: self.facts.incarnation,
            names.STEP_NUMBER: self.number,
            names.STEP_ROWS: self.num_rows,
            names.STEP_PREFILL_TOKENS: self.num_prefill_tokens,
            names.STEP_DECODE_TOKENS: self.num_decode_tokens,
            names.STEP_LINKS_LEFT_OUT: self.num_links_left_out or None,
            names.COLLECTIVES_S: self.collectives_s or None,
            **dict(zip(names.STEP_PARTS, self._parts_s(), strict=True)),
        }

    def _parts_s(self) -> list[float]:
        return [end_s - began_s for began_s, end_s in pairwise(self.times_s)]
