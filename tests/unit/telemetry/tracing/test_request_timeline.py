"""Spans of a request's timeline."""

from __future__ import annotations

import pytest

from baton.telemetry import names
from baton.telemetry.metrics.instruments import RouterMetrics
from baton.telemetry.tracing.request_timeline import (
    AttemptTimeline,
    Judgement,
    RequestTimeline,
    VllmLegTimeline,
)
from baton.telemetry.tracing.spans import End, Span, SpanOutcome
from tests.support.traces import a_request, to_unix_ns


@pytest.mark.parametrize("has_failed_try", [False, True])
def test_the_spans_of_a_request_have_no_gap(has_failed_try: bool) -> None:
    timeline = a_request(has_failed_try=has_failed_try)

    spans = timeline.spans(to_unix_ns)

    for parent in spans:
        assert_no_gap(parent, [one for one in spans if one.parent_id == parent.span_id])


def test_each_span_has_the_role_of_its_process() -> None:
    """Some viewers drop the resource, which contains the role too."""
    spans = a_request(has_failed_try=True).spans(to_unix_ns)

    assert {span.attributes.get(names.ROLE) for span in spans} == {"router"}


def test_the_route_span_ends_with_the_first_call_and_has_an_event_at_the_choice() -> None:
    spans = a_request().spans(to_unix_ns)

    route, prefill = the(spans, names.ROUTE), the(spans, names.PREFILL)
    assert route.began_ns == the(spans, names.ADMIT).ended_ns
    assert route.ended_ns == prefill.began_ns
    assert [(one.name, one.at_ns) for one in route.events] == [(names.CHOSEN, to_unix_ns(10.003))]
    assert route.attributes[names.CHOSEN_HOLDER] == "d1"
    assert route.attributes[names.PROMISED_TOKENS] == 32


@pytest.mark.parametrize("has_failed_try", [False, True])
def test_prompts_that_vllm_servers_compute_have_spans_before_the_first_route(
    has_failed_try: bool,
) -> None:
    timeline = a_request(has_failed_try=has_failed_try)
    assert timeline.admitted_s is not None
    first_s, second_s, end_s = (timeline.admitted_s + ms / 1e4 for ms in (0, 2, 4))
    failed = End(second_s, SpanOutcome.FAILED, "TimeoutError")
    timeline.vllm_legs = [
        VllmLegTimeline(50, "vllm://a:8000", first_s, failed),
        VllmLegTimeline(51, "vllm://b:8000", second_s, End(end_s)),
    ]

    spans = timeline.spans(to_unix_ns)

    legs = [span for span in spans if span.attributes.get(names.PROVIDER) == "vllm"]
    assert [(leg.span_id, leg.attributes[names.SERVER_ADDRESS]) for leg in legs] == [
        (50, "vllm://a:8000"),
        (51, "vllm://b:8000"),
    ]
    assert legs[0].attributes[names.ERROR_TYPE] == "TimeoutError"
    routes = [span for span in spans if span.name == names.ROUTE]
    assert min(route.began_ns for route in routes) == legs[1].ended_ns
    root = the(spans, names.GENERATE)
    assert {leg.parent_id for leg in legs} == {root.span_id}
    assert_no_gap(root, [one for one in spans if one.parent_id == root.span_id])


def test_a_retry_starts_at_the_first_failure_of_the_previous_attempt() -> None:
    timeline = a_request(has_failed_try=True)
    for leg, at_s in zip(timeline.tries[0].legs, (10.39, 10.395), strict=True):
        leg.end = End(at_s, SpanOutcome.FAILED, "UNAVAILABLE")

    again = the(timeline.spans(to_unix_ns), names.MIGRATE)

    assert again.began_ns == to_unix_ns(10.39)


def test_a_retry_starts_at_the_end_of_the_last_leg_without_a_failure_reason() -> None:
    timeline = a_request(has_failed_try=True)
    for leg, at_s in zip(timeline.tries[0].legs, (10.3, 10.395), strict=True):
        leg.end = End(at_s)

    again = the(timeline.spans(to_unix_ns), names.MIGRATE)

    assert again.began_ns == to_unix_ns(10.395)


def test_a_request_without_a_node_ends_in_its_route_span() -> None:
    timeline = a_request()
    timeline.tries = [AttemptTimeline(1, 0, 100, 109)]
    timeline.end = End(10.5, SpanOutcome.REFUSED, "NO_NODES")
    timeline.first_token_s = timeline.finish = None

    route = the(timeline.spans(to_unix_ns), names.ROUTE)

    assert (route.began_ns, route.ended_ns) == (to_unix_ns(10.002), to_unix_ns(10.5))
    assert route.attributes[names.ERROR_TYPE] == "NO_NODES"


def test_a_request_that_was_never_admitted_has_an_admit_span_until_its_end() -> None:
    timeline = RequestTimeline("r1", a_request().context, None, 10.0, end=End(10.7))

    admit = the(timeline.spans(to_unix_ns), names.ADMIT)

    assert (admit.began_ns, admit.ended_ns) == (to_unix_ns(10.0), to_unix_ns(10.7))


def the(spans: list[Span], name: str) -> Span:
    [found] = [span for span in spans if span.name == name]
    return found


def assert_no_gap(parent: Span, children: list[Span]) -> None:
    if not children:
        return
    reached = parent.began_ns
    for child in sorted(children, key=lambda span: span.began_ns):
        assert child.began_ns <= reached, f"nothing tells of the time before {child.name}"
        reached = max(reached, child.ended_ns)
    assert reached >= parent.ended_ns


def test_suspicions_of_a_request_are_counted_span_events() -> None:
    timeline, metrics = a_request(has_failed_try=True), RouterMetrics()
    timeline.judgements = [Judgement(10.4, "suspect", "h:2"), Judgement(10.9, "poison", "h:3")]

    [generate] = [one for one in timeline.spans(to_unix_ns) if one.name == names.GENERATE]
    metrics.take(timeline)

    reported = [event.attributes for event in generate.events if event.name == names.JUDGED]
    assert reported == [
        {names.VERDICT: "suspect", names.SERVER_ADDRESS: "h:2"},
        {names.VERDICT: "poison", names.SERVER_ADDRESS: "h:3"},
    ]
    counts = {
        verdict: metrics.registry.get_sample_value("baton_suspects_total", {"verdict": verdict})
        for verdict in ("bystander", "suspect", "poison")
    }
    assert counts == {"bystander": 0, "suspect": 1, "poison": 1}
