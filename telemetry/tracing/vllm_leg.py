"""Prompts that vLLM servers compute for a request, and their spans. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.telemetry import names
from baton.telemetry.tracing.spans import End, Span, SpanKind, SpanMaker, SpanOutcome

COMPLETIONS = "/v1/completions"


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
