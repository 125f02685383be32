"""Engine crashes over real gRPC: the router retries on another node."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from baton.core.legs import LegKind
from baton.core.output import Finish
from baton.core.sampling import SamplingParams
from baton.engine.core import EngineCore
from baton.engine.plan import Plan, RunResult
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.dispatch.retries import DispatchConfig
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestContext
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.served_models import Node
from baton.router.values import GenerateCall, TokenChunk, TokenPrompt
from baton.rpc.errors import GenerationFailed, PoisonedRequest
from tests.support.engines import VOCAB_SIZE, an_engine
from tests.support.fake_runner import FakeRunner, KvTensor, SynchronousRunner, tokens_alone
from tests.support.node_calls import a_card, a_table
from tests.support.node_servers import a_node_server
from tests.support.profiles import profiles_of

PATIENCE_S = 30
NUM_BLOCKS, BLOCK_SIZE = 64, 4  # of an_engine
PROMPT, SEED, NUM_TOKENS = (3, 4, 5), 7, 12


class Bug(Exception):
    """Unexpected error of an engine."""


@dataclass(slots=True)
class Fate:
    """Plan of engine crashes: the first `num_deaths` engines that run a request crash."""

    num_passes: int  # that each of them does before
    num_deaths: int


@dataclass(slots=True)
class DyingRunner(SynchronousRunner):
    runner: FakeRunner
    fate: Fate
    num_passes: int = 0
    is_dead: bool = False

    def run(self, plan: Plan) -> RunResult:
        if self.is_dead:
            raise Bug("it was dead before")
        if plan.num_scheduled_tokens:
            self._die_if_due()
            self.num_passes += 1
        return self.runner.run(plan)

    def _die_if_due(self) -> None:
        if self.fate.num_deaths and self.num_passes == self.fate.num_passes:
            self.fate.num_deaths -= 1
            self.is_dead = True
            raise Bug("index out of range")


def a_runner() -> FakeRunner:
    return FakeRunner(KvTensor(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE)


class Failing(FakeRunner):
    """Runner whose passes all fail."""

    def __init__(self, kv: KvTensor) -> None:
        super().__init__(kv, VOCAB_SIZE)

    def run(self, plan: Plan) -> RunResult:
        if plan.num_scheduled_tokens:
            raise Bug("index out of range")
        return super().run(plan)


def engines(num_engines: int, fate: Fate) -> list[EngineCore]:
    return [
        an_engine(num_blocks=NUM_BLOCKS, runner=DyingRunner(a_runner(), fate))
        for _ in range(num_engines)
    ]


async def generate(pipeline: Pipeline) -> tuple[list[int], Finish]:
    token_ids: list[int] = []
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=SEED, ignore_eos=True)
    call = GenerateCall("r", TokenPrompt(PROMPT), sampling)
    async for part in pipeline.generate(call, RequestContext(time.monotonic())):
        if isinstance(part, Finish):
            return token_ids, part
        assert isinstance(part, TokenChunk)
        assert part.first_index == len(token_ids), "a token came twice, or was left out"
        token_ids += part.token_ids
    raise AssertionError("the answer had no end")


def generate_on(*engines: EngineCore) -> tuple[list[int], Finish]:
    """Run one request on a router with one decode node per engine."""

    async def scenario() -> tuple[list[int], Finish]:
        async with AsyncExitStack() as running, asyncio.timeout(PATIENCE_S):
            nodes = []
            for number, core in enumerate(engines):
                name = f"d{number}"
                node = await running.enter_async_context(a_node_server(name=name, core=core))
                nodes.append(Node(node.address, a_card(LegKind.DECODE, name)))
            node_calls = await running.enter_async_context(GrpcNodeCalls())
            routing = Routing(RoutingPolicy.ROUND_ROBIN)
            config = PipelineConfig(DispatchConfig(retry_pause_s=0.0, routing=routing))
            table = a_table(*nodes)
            pipeline = Pipeline(
                table=table,
                node_calls=node_calls,
                profiles=profiles_of(table),
                clock=time.monotonic,
                config=config,
            )
            return await generate(pipeline)

    return asyncio.run(scenario())


@pytest.mark.parametrize("num_passes", [0, 1, 5])
def test_a_stream_continues_on_another_node_when_an_engine_dies(num_passes: int) -> None:
    token_ids, finish = generate_on(*engines(2, Fate(num_passes, num_deaths=1)))

    assert token_ids == tokens_alone(PROMPT, SEED, NUM_TOKENS, VOCAB_SIZE)
    assert finish.served.attempts == 2


@pytest.mark.parametrize("num_passes", [0, 1, 5])
def test_a_request_crashes_two_engines_at_most_and_its_client_gets_the_reason(
    num_passes: int,
) -> None:
    fate = Fate(num_passes, num_deaths=3)

    with pytest.raises(PoisonedRequest, match="the engine stopped: Bug"):
        generate_on(*engines(3, fate))

    assert fate.num_deaths == 1


def test_a_request_with_failing_passes_is_tried_on_two_nodes_which_survive() -> None:
    cores = [an_engine(runner=Failing(KvTensor(NUM_BLOCKS, BLOCK_SIZE))) for _ in range(3)]

    with pytest.raises(PoisonedRequest, match="INTERNAL: Bug: index out of range"):
        generate_on(*cores)

    assert [core.failure for core in cores] == [None] * 3
    assert sum(core.scheduler.stats().total_prefix_query_tokens > 0 for core in cores) == 2


def test_an_error_of_the_request_is_not_retried() -> None:
    class NotFinite(FakeRunner):
        def run(self, plan: Plan) -> RunResult:
            self.failing.update(plan.num_scheduled_tokens)
            return super().run(plan)

    runners = [NotFinite(KvTensor(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE) for _ in range(2)]

    with pytest.raises(GenerationFailed, match="not finite"):
        generate_on(*(an_engine(runner=runner) for runner in runners))

    assert sum(bool(runner.num_computed) for runner in runners) == 1
