"""Timelines of a node's calls, from the steps of its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.plan import Plan, PlanRow
from engine.request import RequestId
from engine.sampling import SamplingParams
from kv_transfer.types import HandoffId
from node.call_streams import CallContext
from node.tracing import NodeTracing
from telemetry import names
from telemetry.metrics.instruments import NodeMetrics
from telemetry.tracing.node_timeline import NodeFacts, NodeTimeline
from telemetry.tracing.spans import TraceContext
from tests.support.engines import VOCAB_SIZE, a_spec, an_engine
from tests.support.fake_runner import Crash, CrashPlace, FakeRunner, KvTensor
from tests.support.tracers import TakingTracer

PARENT = TraceContext(0xABC, 0x1)
CALLER = CallContext(((names.TRACEPARENT, PARENT.traceparent),))


@pytest.fixture
def tracing() -> NodeTracing:
    return NodeTracing(TakingTracer(), NodeFacts("prefill", "p0", "1"))


@contextmanager
def a_call(tracing: NodeTracing, name: str) -> Iterator[NodeTimeline]:
    """Record a call whose request is `name#1` in the engine."""
    with tracing.record_call(CALLER, HandoffId(name, 1), a_spec(f"{name}#1")) as timeline:
        assert timeline is not None
        yield timeline


def test_a_pass_that_is_run_again_in_parts_is_a_chunk_of_those_that_succeed(
    tracing: NodeTracing,
) -> None:
    runner = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId("b#1"): CrashPlace.PASS}
    engine = an_engine(runner=runner, observers=tracing.step_observers())

    with a_call(tracing, "a") as a, a_call(tracing, "b") as b:
        for name in "ab":
            engine.scheduler.add(a_spec(f"{name}#1", prompt=(1, 2, 3)))
        engine.step()

    assert [chunk.num_tokens for chunk in a.chunks] == [3]
    assert (len(a.starts), len(b.starts), b.chunks) == (1, 1, [])
    assert tracing.num_steps == 1


def test_a_pass_that_ends_the_engine_is_a_start_of_its_requests(tracing: NodeTracing) -> None:
    runner = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId(f"{name}#1"): CrashPlace.PASS for name in "abcd"}
    engine = an_engine(runner=runner, observers=tracing.step_observers())

    with a_call(tracing, "a") as timeline:
        for name in "abcd":
            engine.scheduler.add(a_spec(f"{name}#1"))
        with pytest.raises(Crash):
            engine.step()

    assert len(timeline.starts) == 1
    assert timeline.chunks == []


def test_a_call_that_ended_gets_no_chunks_once_its_request_is_dropped(
    tracing: NodeTracing,
) -> None:
    name = RequestId("a#1")
    row = PlanRow(name, (1,) * 20, 20, 0, ((),), SamplingParams(), seed=0)
    with a_call(tracing, "a") as timeline:
        tracing.note_plan(Plan(started=(row,)), 1.2)
        tracing.note_pass(Plan(num_scheduled_tokens={name: 4}), 1.3, 1.4)
    tracing.note_plan(Plan(dropped=(name,)), 2.2)

    tracing.note_pass(Plan(num_scheduled_tokens={name: 4}), 2.3, 2.4)

    assert [chunk.began_s for chunk in timeline.chunks] == [1.3]


def test_passes_are_counted_with_the_parts_that_are_run_again() -> None:
    metrics = NodeMetrics("prefill")
    runner = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId("b"): CrashPlace.PASS}
    engine = an_engine(runner=runner, observers=[metrics])
    for name in "ab":
        engine.scheduler.add(a_spec(name, prompt=(1, 2, 3)))

    engine.step()
    engine.scheduler.add(a_spec("c", prompt=(1, 2, 3)))
    engine.step()

    sampled = metrics.registry.get_sample_value
    assert sampled("baton_step_seconds_count") == 2
    assert sampled("baton_step_requests_sum") == 1 + 2
    assert sampled("baton_prompt_tokens_computed_total", {"role": "prefill"}) == 3
