"""Timelines of a node's calls, from the steps of its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.core.ids import BlockId, HandoffId, NodeId, Peer, RequestId
from baton.core.legs import LegKind
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow, StepRecord
from baton.kv_transfer.external_kv import ExternalOrders, ExternalReports, Load, Loaded, LoadId
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.types import (
    NO_REPORTS,
    NOT_CACHED,
    TOO_MANY_PULLS,
    KvOrders,
    KvReports,
    Receive,
)
from baton.node.call_streams import CallContext
from baton.node.observers.tracing import NodeTracing
from baton.telemetry import names
from baton.telemetry.metrics.instruments import NodeMetrics
from baton.telemetry.tracing.node_timeline import NodeFacts, NodeTimeline
from baton.telemetry.tracing.spans import TraceContext
from baton.telemetry.tracing.traces import note_of
from tests.support.engines import VOCAB_SIZE, an_engine, an_engine_request
from tests.support.fake_runner import Crash, CrashPlace, FakeRunner, KvTensor
from tests.support.tracers import TakingTracer
from tests.support.traces import to_unix_ns

PARENT = TraceContext(0xABC, 0x1)
CALLER = CallContext(((names.TRACEPARENT, PARENT.traceparent),))


@pytest.fixture
def tracing() -> NodeTracing:
    return NodeTracing(TakingTracer(), NodeFacts("prefill", "p0", "1"))


@contextmanager
def a_call(tracing: NodeTracing, name: str) -> Iterator[NodeTimeline]:
    """Record a call whose request is `name#1` in the engine."""
    with tracing.record_call(CALLER, LegKind.PREFILL, an_engine_request(f"{name}#1")) as timeline:
        assert timeline is not None
        yield timeline


def test_a_pass_repeated_in_parts_is_a_chunk_of_the_successful_requests(
    tracing: NodeTracing,
) -> None:
    runner = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId("b#1"): CrashPlace.PASS}
    engine = an_engine(runner=runner, observers=tracing.step_observers())

    with a_call(tracing, "a") as a, a_call(tracing, "b") as b:
        for name in "ab":
            engine.scheduler.add(an_engine_request(f"{name}#1", prompt=(1, 2, 3)))
        engine.step()

    assert [chunk.num_tokens for chunk in a.chunks] == [3]
    assert (len(a.starts), len(b.starts), b.chunks) == (1, 1, [])
    assert tracing.num_steps == 1


def test_a_chunk_has_the_time_in_collectives_of_its_pass() -> None:
    spent_s = [0.0]
    tracing = NodeTracing(
        TakingTracer(), NodeFacts("prefill", "p0", "1"), collectives_s=lambda: spent_s[0]
    )
    name = RequestId("a#1")
    row = PlanRow(name, (1,) * 20, 20, 0, ((),), SamplingParams(), seed=0)
    with a_call(tracing, "a") as timeline:
        tracing.note_plan(Plan(started=(row,)), 1.0)
        for spent_s[0] in (0.25, 0.75):
            tracing.note_pass(Plan(num_scheduled_tokens={name: 10}), 1.0, 2.0)

    assert [chunk.collectives_s for chunk in timeline.chunks] == [0.25, 0.5]
    [compute] = [each for each in timeline.spans(to_unix_ns) if each.name == names.PREFILL_COMPUTE]
    assert compute.attributes[names.COLLECTIVES_S] == 0.75


def test_a_pass_that_ends_the_engine_records_the_start_of_its_requests(
    tracing: NodeTracing,
) -> None:
    runner = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId(f"{name}#1"): CrashPlace.PASS for name in "abcd"}
    engine = an_engine(runner=runner, observers=tracing.step_observers())

    with a_call(tracing, "a") as timeline:
        for name in "abcd":
            engine.scheduler.add(an_engine_request(f"{name}#1"))
        with pytest.raises(Crash):
            engine.step()

    assert len(timeline.starts) == 1
    assert timeline.chunks == []


def test_an_ended_call_gets_no_further_chunks(
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


def test_pulls_are_span_events_of_the_wait_of_their_request(
    tracing: NodeTracing,
) -> None:
    handoff_id, peer = HandoffId("pull-p0-1", 7), Peer(NodeId("d0"), "host:1")
    order = Receive(handoff_id, peer, 0, (BlockId(3),), 16, names=(b"n",), request_id="a#1")
    record = TransferRecord(
        handoff_id, TransferRole.PULLED, "nixl", 1.2, peer.node_id, "done", 1, 512, ended_s=1.5
    )
    with a_call(tracing, "a") as timeline:
        tracing.note_plan(Plan(kv_orders=KvOrders(receives=(order,))), 1.2)
        tracing.note_end(StepRecord(Plan(), (0.0,) * 6, NO_REPORTS, (record,)))

    [wait] = [each for each in timeline.spans(to_unix_ns) if each.name == names.PREFILL_WAIT]
    [event] = wait.events
    assert (event.name, event.at_ns) == (names.KV_PULL, to_unix_ns(1.2))
    assert event.attributes == {
        names.KV_BLOCKS: 1,
        names.KV_BYTES: 512,
        names.KV_PEER: "d0",
        names.KV_OUTCOME: "done",
        names.KV_DURATION: pytest.approx(0.3),
    }


def test_loads_are_span_events_of_the_wait_of_their_request() -> None:
    tracing = NodeTracing(TakingTracer(), NodeFacts("prefill", "p0", "1", block_bytes=512))
    blocks = tuple(map(BlockId, (3, 4, 5)))
    order = Load(LoadId(7), (b"a", b"b", b"c"), blocks, request_id="a#1")
    loaded = ExternalReports(loaded=(Loaded(LoadId(7), ("host", None, "host")),))
    times_s = (1.0, 1.1, 1.2, 1.3, 1.689, 1.7)
    with a_call(tracing, "a") as timeline:
        tracing.note_plan(Plan(kv_orders=KvOrders(external=ExternalOrders(loads=(order,)))), 1.2)
        tracing.note_end(StepRecord(Plan(), times_s, KvReports(external=loaded), ()))

    [wait] = [each for each in timeline.spans(to_unix_ns) if each.name == names.PREFILL_WAIT]
    done, lost = wait.events
    assert (done.name, done.at_ns) == (names.KV_LOAD, to_unix_ns(1.2))
    assert done.attributes == {
        names.KV_TIER: "host",
        names.KV_BLOCKS: 2,
        names.KV_BYTES: 1024,
        names.KV_OUTCOME: "done",
        names.KV_DURATION: pytest.approx(0.489),
    }
    assert (lost.attributes[names.KV_TIER], lost.attributes[names.KV_OUTCOME]) == ("", "lost")
    assert note_of(wait) == (
        "loaded 2 blocks from host in 489.0 ms, 1 KiB, "
        "loaded 1 block in 489.0 ms, 512 B (lost), for batch"
    )


def test_a_load_that_timed_out_is_unfinished_in_the_trace(
    tracing: NodeTracing,
) -> None:
    order = Load(LoadId(7), (b"a",), (BlockId(3),), request_id="a#1")
    with a_call(tracing, "a") as timeline:
        tracing.note_plan(Plan(kv_orders=KvOrders(external=ExternalOrders(loads=(order,)))), 1.2)

    [wait] = [each for each in timeline.spans(to_unix_ns) if each.name == names.PREFILL_WAIT]
    [event] = wait.events
    assert event.attributes[names.KV_OUTCOME] == "unfinished"


@pytest.mark.parametrize(
    ("role", "outcome", "counted"),
    [
        (TransferRole.PULLED, "done", "done"),
        (TransferRole.PULLED, f"the peer: {NOT_CACHED}", "refused"),
        (TransferRole.PULLED, "link lost", "failed"),
        (TransferRole.GIVEN, "announced", "done"),
        (TransferRole.GIVEN, TOO_MANY_PULLS, "refused"),
    ],
)
def test_pulls_and_hand_offs_are_counted_separately(
    role: TransferRole, outcome: str, counted: str
) -> None:
    metrics = NodeMetrics("prefill")
    record = TransferRecord(HandoffId("pull", 1), role, "nixl", 1.0, outcome=outcome, num_bytes=512)

    metrics.take(record, None)

    sampled, labels = metrics.registry.get_sample_value, {"direction": role.value}
    assert sampled("baton_handoffs_total", {**labels, "outcome": counted}) == 1
    moved = sampled("baton_kv_bytes_total", {**labels, "transport": "nixl"})
    assert moved == (512 if counted == "done" else None)


def test_pass_counts_include_repeated_parts() -> None:
    metrics = NodeMetrics("prefill")
    runner = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId("b"): CrashPlace.PASS}
    engine = an_engine(runner=runner, observers=[metrics])
    for name in "ab":
        engine.scheduler.add(an_engine_request(name, prompt=(1, 2, 3)))

    engine.step()
    engine.scheduler.add(an_engine_request("c", prompt=(1, 2, 3)))
    engine.step()

    sampled = metrics.registry.get_sample_value
    assert sampled("baton_step_seconds_count") == 2
    assert sampled("baton_step_requests_sum") == 1 + 2
    assert sampled("baton_prompt_tokens_computed_total", {"role": "prefill"}) == 3
