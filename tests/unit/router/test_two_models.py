"""Two models in one pipeline: queues, forecasts, retries and quarantine do not mix."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.core.legs import LegKind
from baton.core.output import Finish
from baton.core.request import EMBED
from baton.core.sampling import SamplingParams
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.answer import IncrementalDetokenizer, NoDetokenizer
from baton.router.dispatch.node_rpcs import Deliver, NodeCalls
from baton.router.dispatch.quarantine import Quarantine, QuarantineVerdict, Suspicion
from baton.router.dispatch.retries import CircuitBreakers, DispatchConfig
from baton.router.dispatch.route_finder import RouteFinder
from baton.router.input_processing.model_profiles import ModelProfile, ModelProfiles
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.pictures.families.gemma3 import Gemma3Format
from baton.router.pictures.plan import ImageFile, Size
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestContext
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Leg, Route, handed_over
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.router.tracing import UNTRACED, RequestTrace
from baton.router.values import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    Prompt,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from baton.rpc.errors import (
    FailureKind,
    NodeFailed,
    NoNodes,
    TooLate,
    UnknownModel,
    UnsupportedInput,
)
from tests.support.node_calls import FakeNodeCalls, a_node_of, a_table, an_embedder
from tests.support.waits import reaches, until

A, B = ModelVariant("a"), ModelVariant("b")
NO_DEADLINE = RequestContext(0.0)
PATIENCE_S = 30.0


class NodesByModel:
    """Sends the calls to each model's nodes to a fake of their own."""

    def __init__(self, **by_model: FakeNodeCalls) -> None:
        self._by_model = by_model

    async def call(
        self,
        leg: Leg,
        request: object,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        nodes: NodeCalls = self._by_model[leg.node.card.model]
        await nodes.call(leg, request, deliver, timeout_s=timeout_s, trace=trace)  # type: ignore[arg-type]


class TickingClock:
    """Clock that advances by a second at every reading, until it is stopped."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += not self.is_stopped
        return self._now_s


class HeldText(TextBoundary):
    """Tokenizer that takes until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        assert self.may_end.wait(PATIENCE_S)
        return (3, 4)


class Letter(TextBoundary):
    """Tokenizer for which every token is the same letter."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self._letter = letter

    def create_detokenizer(self, shown: Collection[str] = ()) -> IncrementalDetokenizer:
        return LetterDetokenizer(self._letter)


class LetterDetokenizer(NoDetokenizer):
    def __init__(self, letter: str) -> None:
        self._letter = letter

    def push(self, *token_ids: int) -> str:
        return self._letter * len(token_ids)


def pairs_of(*models: str, **fields: Any) -> list[Node]:
    return [
        a_node_of(model, role, **fields)
        for model in models
        for role in (LegKind.PREFILL, LegKind.DECODE)
    ]


def a_pipeline(
    nodes: NodeCalls,
    table: NodeTable | None = None,
    *,
    max_in_flight: int | None = None,
    clock: Callable[[], float] | None = None,
    profiles: tuple[ModelProfile, ...] = (),
) -> Pipeline:
    ticks = itertools.count()
    table = a_table(*pairs_of("a", "b", max_num_seqs=2)) if table is None else table
    pipeline = Pipeline(
        table=table,
        node_calls=nodes,
        profiles=ModelProfiles(table, profiles),
        clock=clock or (lambda: float(next(ticks))),
        config=PipelineConfig(
            DispatchConfig(retry_pause_s=0.0, routing=Routing(RoutingPolicy.ROUND_ROBIN)),
            AdmissionQueueConfig(max_in_flight),
        ),
    )
    pipeline.handle_nodes_changed()
    return pipeline


def a_call(model: ModelVariant, request_id: str = "x") -> GenerateCall:
    return GenerateCall(request_id, TokenPrompt((3, 4)), SamplingParams(max_tokens=6), model=model)


async def answer(
    pipeline: Pipeline, call: GenerateCall, context: RequestContext = NO_DEADLINE
) -> tuple[list[int], Finish | None]:
    token_ids, finish = list[int](), None
    async with aclosing(pipeline.generate(call, context)) as parts:
        async for part in parts:
            if isinstance(part, TokenChunk):
                token_ids += part.token_ids
            else:
                finish = part
    return token_ids, finish


@asynccontextmanager
async def filled(pipeline: Pipeline, model: ModelVariant, num: int) -> AsyncIterator[None]:
    """Hold endless requests to a model, more than its nodes run at once."""
    tasks = [
        asyncio.ensure_future(answer(pipeline, a_call(model, f"{model.name}-{number}")))
        for number in range(num)
    ]
    traffic = pipeline.traffic
    await until(lambda: traffic.num_waiting + traffic.num_in_flight, reaches(num))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_full_queue_of_one_model_does_not_delay_another() -> None:
    nodes = NodesByModel(a=FakeNodeCalls(is_endless=True), b=FakeNodeCalls())
    pipeline = a_pipeline(nodes)

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), filled(pipeline, A, 5):
            assert pipeline.traffic.of(A).admission.queue.num_waiting == 3
            for _ in range(4):
                token_ids, _finish = await answer(pipeline, a_call(B))
                assert len(token_ids) == 6
            assert pipeline.traffic.of(B).admission.queue.num_waiting == 0

    asyncio.run(scenario())
    assert (pipeline.traffic.num_waiting, pipeline.traffic.num_in_flight) == (0, 0)


def test_answers_have_the_text_of_their_model() -> None:
    profiles = (ModelProfile(Letter("x"), "a"), ModelProfile(Letter("y"), "b"))
    pipeline = a_pipeline(FakeNodeCalls(), profiles=profiles)

    async def text_of(model: ModelVariant) -> str:
        async with aclosing(pipeline.generate(a_call(model), NO_DEADLINE)) as parts:
            return "".join([part.text async for part in parts if isinstance(part, TokenChunk)])

    assert [asyncio.run(text_of(model)) for model in (A, B)] == ["xxxxxx", "yyyyyy"]


def test_large_texts_of_one_model_leave_another_its_threads() -> None:
    slow, fast = HeldText(), HeldText()
    profiles = (ModelProfile(slow, "a"), ModelProfile(fast, "b"))
    pipeline = a_pipeline(FakeNodeCalls(), profiles=profiles)
    large = TextPrompt("a" * 10_000)
    fast.may_end.set()

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S):
            held = [asyncio.ensure_future(pipeline.inputs.token_ids(large, A)) for _ in range(20)]
            await asyncio.sleep(0)
            assert await pipeline.inputs.token_ids(large, B) == (3, 4)
            assert not any(task.done() for task in held)
            slow.may_end.set()
            await asyncio.gather(*held)

    asyncio.run(scenario())


def test_forecasts_of_a_slow_model_refuse_no_requests_to_another() -> None:
    nodes = NodesByModel(a=FakeNodeCalls(is_endless=True), b=FakeNodeCalls())
    clock = TickingClock()
    pipeline = a_pipeline(nodes, clock=clock)

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), filled(pipeline, A, 12):
            for _ in range(100):  # until the first two have a token
                await asyncio.sleep(0)
            clock.is_stopped = True
            soon = RequestContext(clock(), deadline_s=clock() + 5.0)
            with pytest.raises(TooLate):
                await answer(pipeline, a_call(A, "late"), soon)
            assert len((await answer(pipeline, a_call(B), soon))[0]) == 6

    asyncio.run(scenario())


def test_failures_of_one_models_nodes_leave_another_its_retries() -> None:
    failing = FakeNodeCalls(decode_breaks_after=[0] * 20)
    weak = FakeNodeCalls(decode_breaks_after=[0])
    pipeline = a_pipeline(NodesByModel(a=failing, b=weak), max_in_flight=1)

    async def scenario() -> None:
        for number in range(3):
            with pytest.raises(NodeFailed):
                await answer(pipeline, a_call(A, str(number)))
        assert len((await answer(pipeline, a_call(B)))[0]) == 6

    asyncio.run(scenario())
    assert pipeline.traffic.of(A).retry_budget.spend() is False


def a_route(model: str) -> Route:
    prefill, decode = pairs_of(model)
    return Route(handed_over(prefill, decode))


def test_a_suspect_of_one_model_closes_no_nodes_to_another() -> None:
    table = a_table(*pairs_of("a", "b"))
    quarantine = Quarantine(lambda: None)
    config = DispatchConfig(quarantine_patience_s=PATIENCE_S)
    routes = RouteFinder(table, config, CircuitBreakers(), quarantine, lambda: 0.0)
    suspect, bystander = Suspicion(), Suspicion()
    route = a_route("a")
    first = quarantine.track(suspect, route)
    other = quarantine.track(bystander, a_route("b"))
    verdict = quarantine.judge(first, route.last.node.address, FailureKind.ENGINE_FAILED)
    quarantine.end(first)
    quarantine.end(other)
    test = quarantine.track(suspect, route)  # alone on the nodes of its model

    async def find(model: ModelVariant) -> Route:
        request = RoutingRequest((3, 4), model=model)
        return await routes.find(request, frozenset(), Suspicion())

    assert verdict is QuarantineVerdict.SUSPECT
    assert not bystander.is_suspect
    assert quarantine.closed_addresses(Suspicion()) == set(route.addresses)
    found = asyncio.run(asyncio.wait_for(find(B), 1.0))  # it does not wait for the test
    assert found.is_split
    assert {leg.node.card.model for leg in found.legs} == {"b"}
    quarantine.end(test)


def test_turns_of_nodes_are_counted_by_model() -> None:
    two = [a_node_of(model, LegKind.DECODE, f"{model}{n}") for model in "ab" for n in range(2)]
    config = DispatchConfig(routing=Routing(RoutingPolicy.ROUND_ROBIN, kv_pulls=False))
    routes = RouteFinder(
        a_table(*two), config, CircuitBreakers(), Quarantine(lambda: None), lambda: 0.0
    )

    async def find() -> list[str]:
        found = []
        for model in (A, B) * 2:  # by turns
            request = RoutingRequest((3, 4), model=model)
            found.append((await routes.find(request, frozenset(), Suspicion())).last.node.address)
        return found

    assert asyncio.run(find()) == ["a0:1", "b0:1", "a1:1", "b1:1"]


def test_models_are_refused_with_the_list() -> None:
    nodes = FakeNodeCalls()
    table = a_table(*pairs_of("a", "b"), an_embedder())
    pipeline = a_pipeline(nodes, table)
    unnamed = a_call(ModelVariant())

    with pytest.raises(UnknownModel, match="'c' is not served here; served: a, b, embedder"):
        asyncio.run(answer(pipeline, a_call(ModelVariant("c"))))
    with pytest.raises(InvalidRequest, match=r"set model to one of: a, b$"):
        asyncio.run(answer(pipeline, unnamed))
    asyncio.run(answer(pipeline, replace(unnamed, task=EMBED)))  # by the only embedder
    assert [received.node for received in nodes.received] == ["embedder-encode"]


def test_before_any_node_joined_a_router_of_several_models_refuses_none() -> None:
    squares = Gemma3Format(Size(4, 4), grid=2, resample=2)
    text = TextBoundary()
    profiles = ModelProfile(text, "a", images=squares), ModelProfile(text, "b")
    pipeline = a_pipeline(FakeNodeCalls(), NodeTable(("a", "b")), profiles=profiles)
    image = ImageFile(b"", "messages.0", uuid="unknown")
    chat = ChatPrompt((ChatMessage("user", (image,)),))

    with pytest.raises(NoNodes, match="set model to one of: a, b"):
        asyncio.run(answer(pipeline, a_call(ModelVariant())))
    # It may be an adapter: then the tokens of its answer are those of the base's tokenizer.
    adapter = ModelVariant("sql")
    with pytest.raises(NoNodes, match=r"does not know what model 'sql' is; send .* again"):
        asyncio.run(answer(pipeline, a_call(adapter)))
    with pytest.raises(NoNodes, match=r"does not know what model 'sql' is"):
        asyncio.run(pipeline.read_files(chat, adapter, client=""))
    with pytest.raises(UnsupportedInput, match="model 'b' takes no images"):
        asyncio.run(pipeline.read_files(chat, B, client=""))
    with pytest.raises(InvalidRequest, match="no image with this uuid"):
        asyncio.run(pipeline.read_files(chat, A, client=""))
