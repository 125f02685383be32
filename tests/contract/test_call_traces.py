"""Span status of ended calls, on the router and on nodes, over real gRPC.

OpenTelemetry's own instrumentation reports cancelled calls and bugs in streams as successful.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Generation
from baton.core.ids import RequestId
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.core import EngineCore
from baton.engine.plan import Plan, RunResult
from baton.node.observers.tracing import NodeTracing
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.dispatch.node_rpcs import LegEvent
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
from baton.router.tracing import LegTrace, RequestTrace, Tracing
from baton.router.values import Prompt
from baton.telemetry import names
from baton.telemetry.tracing.node_timeline import NodeFacts
from baton.telemetry.tracing.spans import Span, SpanStatus, TraceContext
from tests.support.engines import VOCAB_SIZE, an_engine
from tests.support.fake_runner import FakeRunner, KvTensor, SynchronousRunner
from tests.support.node_calls import FakeNodeCalls, a_card
from tests.support.node_servers import NodeServer, a_node_server
from tests.support.routers import UnreliableRouter, a_router
from tests.support.tracers import TakingTracer

PATIENCE_S = 60
CALLER = TraceContext(0xABC, 0x1)
ENDLESS = SamplingParams(max_tokens=6)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


def assert_end(span: Span, status: SpanStatus, outcome: str, rpc: str, kind: str | None) -> None:
    assert span.status is status
    assert span.attributes.get(names.OUTCOME) == outcome
    assert span.attributes[names.RPC_STATUS] == rpc
    assert span.attributes.get(names.ERROR_TYPE) == kind


# --- Client calls, on the router --------------------------------------------------------------


@asynccontextmanager
async def traced_router() -> AsyncIterator[tuple[UnreliableRouter, AsyncClient, TakingTracer]]:
    tracer, nodes = TakingTracer(), FakeNodeCalls(is_endless=True)
    async with (
        a_router(node_calls=nodes, tracing=Tracing(tracer)) as (router, address),
        AsyncClient(address) as client,
    ):
        await client.model()
        yield router, client, tracer


def requested() -> Generation:
    return Generation(ENDLESS, traceparent=CALLER.traceparent)


def test_a_disconnected_client_counts_as_cancelled() -> None:
    async def scenario() -> None:
        async with traced_router() as (router, client, tracer):
            asking = asyncio.ensure_future(client.generate((1,), requested()))
            await router.text.read.get()
            asking.cancel()

            root = (await tracer.next_spans())[0]

        assert (root.name, root.trace_id, root.parent_id) == (names.GENERATE, 0xABC, 0x1)
        assert_end(root, SpanStatus.UNSET, "cancelled", "CANCELLED", None)

    play(scenario())


def test_an_expired_client_deadline_is_a_deadline_exceeded_error() -> None:
    async def scenario() -> None:
        async with traced_router() as (_, client, tracer):
            with pytest.raises(BatonError):
                await client.generate((1,), requested(), timeout_s=0.5)

            root = (await tracer.next_spans())[0]

        late = "DEADLINE_EXCEEDED"
        assert_end(root, SpanStatus.ERROR, "deadline_exceeded", late, late)

    play(scenario())


def test_a_bug_of_the_router_is_an_error_named_after_it() -> None:
    async def scenario() -> None:
        async with traced_router() as (router, client, tracer):
            router.text.token_ids = _broken  # type: ignore[method-assign]
            with pytest.raises(BatonError) as failure:
                await client.generate((1,), requested())

            root = (await tracer.next_spans())[0]

        assert failure.value.code is grpc.StatusCode.UNKNOWN
        assert_end(root, SpanStatus.ERROR, "failed", "UNKNOWN", "ZeroDivisionError")
        assert root.status_message == "a bug"

    play(scenario())


def _broken(prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
    raise ZeroDivisionError("a bug")


# --- Router calls on a shared stream, on the node -----------------------------------------------


class Led(RequestTrace):
    """Request trace that sends the trace context with each node RPC."""

    @contextmanager
    def leg(self, name: str, node: Node) -> Iterator[LegTrace]:
        yield LegTrace(((names.TRACEPARENT, CALLER.traceparent),))


class StuckRunner(SynchronousRunner):
    """Runner whose pass ends when the test releases it."""

    def __init__(self) -> None:
        self._fake = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)
        self.runs, self.may_end = threading.Event(), threading.Event()

    def run(self, plan: Plan) -> RunResult:
        self.runs.set()
        self.may_end.wait()
        return self._fake.run(plan)


class BrokenRunner(SynchronousRunner):
    def run(self, plan: Plan) -> RunResult:
        raise ZeroDivisionError("a bug")


@dataclass
class Called:
    """One call of the router to a node, with the node's tracer."""

    call: asyncio.Task[None]
    calls: GrpcNodeCalls
    server: NodeServer
    tracer: TakingTracer

    async def span(self) -> Span:
        return (await self.tracer.next_spans())[0]


@asynccontextmanager
async def calling(core: EngineCore, timeout_s: float | None = None) -> AsyncIterator[Called]:
    tracer = TakingTracer()
    tracing = NodeTracing(tracer, NodeFacts("decode", "d0", "1"))
    request = EngineRequest(RequestId("r#1"), (1, 2, 3), ENDLESS, seed=1)
    async with a_node_server(core=core, tracing=tracing) as server, GrpcNodeCalls() as calls:
        leg = Leg(LegKind.DECODE, Node(server.address, a_card(LegKind.DECODE)))
        call = asyncio.ensure_future(
            calls.call(leg, request, _ignore, timeout_s=timeout_s, trace=Led())
        )
        yield Called(call, calls, server, tracer)
        call.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await call


def _ignore(event: LegEvent) -> None:
    """Drop the event: only the end of the call matters."""


@asynccontextmanager
async def stuck(timeout_s: float | None = None) -> AsyncIterator[Called]:
    """Yield a call whose engine pass is blocked until the end of the block."""
    runner = StuckRunner()
    async with calling(an_engine(runner=runner), timeout_s) as called:
        try:
            await asyncio.to_thread(runner.runs.wait)
            yield called
        finally:
            runner.may_end.set()


def test_a_call_abandoned_by_the_router_is_cancelled_on_the_node() -> None:
    async def scenario() -> None:
        async with stuck() as called:
            called.call.cancel()

            span = await called.span()

        assert (span.name, span.trace_id, span.parent_id) == (names.DECODE, 0xABC, 0x1)
        assert_end(span, SpanStatus.UNSET, "cancelled", "CANCELLED", None)

    play(scenario())


def test_a_broken_stream_cancels_its_calls_on_the_node() -> None:
    async def scenario() -> None:
        async with stuck() as called:
            await called.calls.channel(called.server.address).close()

            span = await called.span()

        assert_end(span, SpanStatus.UNSET, "cancelled", "CANCELLED", None)

    play(scenario())


def test_a_deadline_that_expires_on_the_node_is_a_deadline_exceeded_error() -> None:
    async def scenario() -> None:
        # A busy machine may deliver the call late, for which a part of the deadline is allowed.
        async with stuck(timeout_s=4.0) as called:
            span = await called.span()

        late = "DEADLINE_EXCEEDED"
        assert_end(span, SpanStatus.ERROR, "deadline_exceeded", late, late)

    play(scenario())


def test_an_engine_failure_is_the_error_of_its_calls() -> None:
    async def scenario() -> None:
        async with calling(an_engine(runner=BrokenRunner())) as called:
            span = await called.span()

        assert_end(span, SpanStatus.ERROR, "failed", "UNAVAILABLE", "ENGINE_STOPPED")
        assert "a bug" in span.status_message

    play(scenario())


def test_a_bug_in_a_call_is_an_error_named_after_it() -> None:
    async def scenario() -> None:
        core = an_engine()
        core.scheduler.validate = _buggy  # type: ignore[method-assign]
        async with calling(core) as called:
            span = await called.span()

        assert_end(span, SpanStatus.ERROR, "failed", "UNKNOWN", "ZeroDivisionError")

    play(scenario())


def _buggy(request: EngineRequest) -> None:
    raise ZeroDivisionError("a bug")
