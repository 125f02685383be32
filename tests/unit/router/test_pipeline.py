"""Router pipeline: single requests on fake nodes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv
from baton.core.ids import AdapterRef, ModelVariant, NodeId, Peer, RequestId
from baton.core.kv_hints import KvHints
from baton.core.legs import GENERATING, LegKind
from baton.core.media import DIGEST_BYTES, MediaSegment
from baton.core.output import Finish, FinishReason, Output, TokenLogprobs
from baton.core.request import PREFETCH, EngineRequest, PrefixSource, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.dispatch.node_rpcs import MAX_WAITING, Events, LegOutput
from baton.router.dispatch.retries import DispatchConfig
from baton.router.dispatch.vllm.prefills import VllmPrefills
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestContext
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.router.values import (
    GenerateCall,
    Prompt,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from baton.rpc.cached_prefixes import PrefixChanges, pack_names
from baton.rpc.errors import (
    AdapterNotLoaded,
    ClientTooSlow,
    DeadlineExceeded,
    Draining,
    EmptyPrompt,
    FailureKind,
    IncompatibleNodes,
    NodeDraining,
    NodeFailed,
    NoNodes,
    RequestIdInUse,
    TooLate,
    UnknownModel,
    UnsupportedInput,
)
from baton.rpc.messages.calls import CallReport
from tests.support.fake_prefills import FakePrefills
from tests.support.node_calls import (
    FINGERPRINT,
    NAMING,
    FakeNodeCalls,
    a_node,
    a_table,
    prompt_logprobs_of,
    reported_adapters,
    token_at,
)
from tests.support.profiles import profiles_of

PROMPT = (3, 4, 5)
LONG_PROMPT = tuple(range(100))  # six full blocks of 16
NO_DEADLINE = RequestContext(0.0)
PATIENCE_S = 30


def a_pipeline(
    nodes: FakeNodeCalls,
    table: NodeTable | None = None,
    *,
    node_patience_s: float = 0.0,
    max_in_flight: int | None = 1024,
    clock: Callable[[], float] | None = None,
    text: TextBoundary | None = None,
    vllm: VllmPrefills | None = None,
    policy: RoutingPolicy = RoutingPolicy.ROUND_ROBIN,
) -> Pipeline:
    ticks = itertools.count()
    table = table or a_table()
    return Pipeline(
        table=table,
        node_calls=nodes,
        profiles=profiles_of(table, text),
        clock=clock or (lambda: float(next(ticks))),
        config=PipelineConfig(
            DispatchConfig(
                max_attempts=3,
                node_patience_s=node_patience_s,
                retry_pause_s=0.0,
                routing=Routing(policy),
            ),
            AdmissionQueueConfig(max_in_flight),
        ),
        foreign_prefills=() if vllm is None else (vllm,),
    )


def a_table_with(adapter: AdapterRef) -> NodeTable:
    """Return a table of two nodes that have the adapter in memory."""
    nodes = (a_node(role) for role in GENERATING)
    table = a_table(*(replace(node, card=replace(node.card, max_loras=1)) for node in nodes))
    for node in table.nodes:
        table.note_adapters(node.address, reported_adapters(adapter))
    return table


def a_call(
    request_id: str = "a",
    *,
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 6,
    model: str = "",
    seed: int | None = None,
) -> GenerateCall:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return GenerateCall(request_id, TokenPrompt(prompt), sampling, model=ModelVariant(model))


async def generated(
    pipeline: Pipeline, call: GenerateCall, context: RequestContext
) -> AsyncGenerator[TokenChunk | Finish, None]:
    """Yield the parts of an answer while its request id is reserved."""
    with pipeline.accept(call.request_id):
        async with aclosing(pipeline.generate(call, context)) as parts:
            async for part in parts:
                yield part


async def run(
    pipeline: Pipeline, call: GenerateCall, context: RequestContext = NO_DEADLINE
) -> tuple[list[int], Finish]:
    token_ids: list[int] = []
    finish = None
    async for part in generated(pipeline, call, context):
        if isinstance(part, TokenChunk):
            assert part.first_index == len(token_ids)
            token_ids += part.token_ids
        else:
            finish = part
    assert finish is not None
    return token_ids, finish


def cached(nodes: FakeNodeCalls, table: NodeTable | None = None) -> int | None:
    _, finish = asyncio.run(run(a_pipeline(nodes, table), a_call()))
    return finish.num_cached_prompt_tokens


def test_cached_tokens_are_those_of_the_node_that_computed_the_prompt() -> None:
    received = CallReport(kv_bytes=2048, kv_blocks=2, prompt_tokens_cached=1)
    alone = CallReport(prompt_tokens_computed=1, prompt_tokens_cached=2)

    assert cached(FakeNodeCalls(num_cached_on_prefill=3, report=received)) == 3
    assert cached(FakeNodeCalls(report=alone), a_table(a_node(LegKind.DECODE))) == 2
    # The KV was lost, and decode computed what it lacked.
    assert cached(FakeNodeCalls(num_cached_on_prefill=3, report=alone)) == 2
    # Preempted after the hand-off, decode computed again what prefill had.
    preempted = replace(received, prompt_tokens_computed=3)
    assert cached(FakeNodeCalls(num_cached_on_prefill=3, report=preempted)) == 3


def test_statistics_of_prefill_that_arrive_after_the_last_token_are_awaited() -> None:
    async def scenario() -> tuple[int | None, int]:
        may_report = asyncio.Event()
        nodes = FakeNodeCalls(num_cached_on_prefill=3, may_prefill_report=may_report)
        num_tokens = 0
        async for part in generated(a_pipeline(nodes), a_call(), NO_DEADLINE):
            if isinstance(part, Finish):
                return part.num_cached_prompt_tokens, num_tokens
            num_tokens += len(part.token_ids)
            if num_tokens == 6:
                may_report.set()
        raise AssertionError("the answer did not complete")

    assert asyncio.run(scenario()) == (3, 6)


def test_an_answer_completes_without_the_statistics_of_a_prefill_node_that_is_frozen() -> None:
    assert cached(FakeNodeCalls(may_prefill_report=asyncio.Event())) is None


def expected_tokens(nodes: FakeNodeCalls, count: int = 6) -> list[int]:
    return [token_at(nodes.received[0].request, index) for index in range(count)]


def test_both_legs_start_with_one_hand_off_id_and_one_seed() -> None:
    nodes = FakeNodeCalls()

    call = replace(a_call(), predicted_token_ids=(8, 9))
    token_ids, finish = asyncio.run(run(a_pipeline(nodes), call))

    prefill, decode = sorted(nodes.received, key=lambda requested: requested.leg is LegKind.DECODE)
    source = Peer(NodeId("prefill"), "prefill:1")
    assert (prefill.leg, decode.leg) == (LegKind.PREFILL, LegKind.DECODE)
    assert prefill.request.send_to == prefill.handoff_id
    assert decode.request.receive_from == ReceiveKv(prefill.handoff_id, source)
    assert prefill.request.seed == decode.request.seed
    assert prefill.request.predicted_token_ids == ()  # it samples one token only
    assert decode.request.predicted_token_ids == (8, 9)
    assert token_ids == expected_tokens(nodes)
    assert finish.served.is_prefill_remote
    assert finish.served.kv_bytes == 2048


def cached_on(*names: str) -> NodeTable:
    """Return a table of one prefill and two decode nodes, some of which have a long prompt."""
    table = a_table(
        *(a_node(LegKind.DECODE, name) for name in ("d0", "d1")), a_node(LegKind.PREFILL, "p0")
    )
    stored = pack_names(NAMING.names(LONG_PROMPT, len(LONG_PROMPT)))
    for name in names:
        table.note_prefixes(f"{name}:1", PrefixChanges(1, True, stored))
    return table


def test_the_node_that_computes_the_prompt_gets_the_holder_of_its_prefix() -> None:
    nodes, alone = FakeNodeCalls(), FakeNodeCalls()
    table, decodes = cached_on("d1"), cached_on("d1")
    decodes.lose("p0:1")

    asyncio.run(run(a_pipeline(nodes, table), a_call(prompt=LONG_PROMPT)))
    asyncio.run(run(a_pipeline(alone, decodes), a_call(prompt=LONG_PROMPT)))

    source = PrefixSource(Peer(NodeId("d1"), "d1:1"), 96)
    sources = {call.leg: call.request.prefix_source for call in nodes.received}
    assert sources == {LegKind.PREFILL: source, LegKind.DECODE: None}
    assert [call.node for call in alone.received] == ["d0"]
    assert [call.request.prefix_source for call in alone.received] == [source]


def test_kv_of_a_vllm_server_needs_no_prefill_and_is_read_once() -> None:
    """A second attempt must not read it: the server may have written other KV there since."""
    nodes = FakeNodeCalls(decode_breaks_after=[1])
    kv = ForeignKv("vllm", 5600, "engine", "cmpl-1", (7,), 96)

    asyncio.run(run(a_pipeline(nodes, cached_on()), replace(a_call(), foreign_kv=kv)))

    first, *others = nodes.received
    assert (first.leg, first.request.foreign_kv) == (LegKind.DECODE, kv)
    assert {call.leg for call in others} == {LegKind.PREFILL, LegKind.DECODE}
    assert all(call.request.foreign_kv is None for call in others)


def test_a_vllm_server_computes_prompts_of_models_without_prefill_nodes() -> None:
    nodes, table = FakeNodeCalls(decode_breaks_after=[1]), cached_on()
    prefills = FakePrefills(table, "d1:1")
    table.lose("p0:1")

    asyncio.run(run(a_pipeline(nodes, table, vllm=prefills), a_call(prompt=LONG_PROMPT)))

    first, second = [call.request.foreign_kv for call in nodes.received]
    assert first is not None
    assert first.age_s is not None
    assert first.age_s > 0
    assert second is None
    assert prefills.num_asked == 1
    assert nodes.received[0].node == "d1"  # the one whose check has passed
    # Shared by all requests whose prompts vLLM servers compute, and by no others.
    assert [call.request.cache_salt for call in nodes.received] == ["vllm!", ""]


@pytest.mark.parametrize("prompt", [LONG_PROMPT, PROMPT], ids=["has prefill nodes", "short"])
def test_vllm_servers_are_not_asked_without_need(prompt: tuple[int, ...]) -> None:
    nodes, table = FakeNodeCalls(), cached_on()
    prefills = FakePrefills(table, "d1:1")
    if prompt is PROMPT:
        table.lose("p0:1")

    asyncio.run(run(a_pipeline(nodes, table, vllm=prefills), a_call(prompt=prompt)))

    assert not prefills.num_asked


def test_vllm_servers_are_not_asked_about_pictures_which_they_would_not_get() -> None:
    node = a_node(LegKind.DECODE)
    table = a_table(replace(node, card=replace(node.card, encodes_pictures=True)))
    prefills = FakePrefills(table, node.address)
    prompt = TokenPrompt(LONG_PROMPT, (MediaSegment(0, 4, bytes(DIGEST_BYTES)),))
    call = replace(a_call(prompt=LONG_PROMPT), prompt=prompt)

    asyncio.run(run(a_pipeline(FakeNodeCalls(), table, vllm=prefills), call))

    assert not prefills.num_asked


def test_a_holder_that_has_just_failed_is_not_named_again() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[1])

    asyncio.run(run(a_pipeline(nodes, cached_on("d0")), a_call(prompt=LONG_PROMPT)))

    prefills = [call for call in nodes.received if call.leg is LegKind.PREFILL]
    assert [call.node for call in nodes.received if call.leg is LegKind.DECODE] == ["d0", "d1"]
    assert [call.request.prefix_source is None for call in prefills] == [False, True]


def test_a_prefetch_is_sent_to_the_node_that_would_compute_the_prompt_and_yields_no_token() -> None:
    nodes = FakeNodeCalls(num_cached_on_prefill=3)
    call = replace(
        a_call(), task=PREFETCH, kv_hints=KvHints(prefetch=True, session_id="s"), tenant="t"
    )

    token_ids, finish = asyncio.run(run(a_pipeline(nodes), call))

    (prefill,) = nodes.received
    assert prefill.leg is LegKind.PREFILL
    assert prefill.request.send_to is None
    assert (prefill.request.kv_hints, prefill.request.tenant) == (call.kv_hints, "t")
    assert (token_ids, finish.num_completion_tokens) == ([], 0)
    assert finish.reason is FinishReason.LENGTH
    assert finish.num_cached_prompt_tokens == 3


def test_a_given_seed_is_kept_and_drawn_ones_differ() -> None:
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes)

    async def three() -> None:
        await run(pipeline, a_call(seed=5))
        await run(pipeline, a_call())
        await run(pipeline, a_call())

    asyncio.run(three())

    seeds = [
        requested.request.seed for requested in nodes.received if requested.leg is LegKind.DECODE
    ]
    assert seeds[0] == 5
    assert seeds[1] != seeds[2]


def test_a_failed_decode_continues_on_another_node_without_gap_or_repeat() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[3])
    table = a_table(
        a_node(LegKind.PREFILL), a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2")
    )

    call = replace(a_call(), predicted_token_ids=(8, 9))
    token_ids, finish = asyncio.run(run(a_pipeline(nodes, table), call))

    first, second = (requested for requested in nodes.received if requested.leg is LegKind.DECODE)
    assert token_ids == expected_tokens(nodes)
    assert (first.handoff_id.attempt, second.handoff_id.attempt) == (1, 2)
    assert first.node != second.node
    assert second.request.prior_output_token_ids == tuple(token_ids[:3])
    assert second.request.seed == first.request.seed
    assert second.request.predicted_token_ids == (8, 9)
    assert second.request.age_s > first.request.age_s > 0  # its place by arrival goes with it
    assert finish.served.attempts == 2


class CutPrefill(FakeNodeCalls):
    """Nodes of which one prefill node's KV reaches nobody."""

    async def decode(self, node: Node, request: EngineRequest, *args: Any, **fields: Any) -> None:
        if request.receive_from is not None and request.receive_from.source.node_id == "p0":
            raise NodeFailed("the KV did not arrive", FailureKind.KV_LOST)
        await FakeNodeCalls.decode(self, node, request, *args, **fields)


def test_a_prefill_node_whose_kv_does_not_arrive_is_avoided() -> None:
    nodes = CutPrefill()
    table = a_table(
        *(a_node(LegKind.PREFILL, name) for name in ("p0", "p1")),
        *(a_node(LegKind.DECODE, name) for name in ("d0", "d1", "d2")),
    )
    stored = pack_names(NAMING.names(LONG_PROMPT, len(LONG_PROMPT)))
    table.note_prefixes("p0:1", PrefixChanges(1, True, stored))  # so that it would be chosen again
    pipeline = a_pipeline(nodes, table, policy=RoutingPolicy.PREFIX_AWARE)

    _, finish = asyncio.run(run(pipeline, a_call(prompt=LONG_PROMPT)))

    computed = [call.node for call in nodes.received if call.leg is LegKind.PREFILL]
    assert computed == ["p0", "p1"]
    assert finish.served.attempts == 2


def test_decode_computes_the_prompt_if_the_only_prefill_node_fails() -> None:
    nodes = FakeNodeCalls(prefill_faults=[NodeFailed("gone")])

    token_ids, finish = asyncio.run(run(a_pipeline(nodes), a_call()))

    assert token_ids == expected_tokens(nodes)
    assert not finish.served.is_prefill_remote
    assert finish.served.prefill_reason
    assert [requested.leg for requested in nodes.received].count(LegKind.PREFILL) == 1


def test_a_prefill_node_lost_after_the_hand_off_causes_no_retry() -> None:
    nodes = FakeNodeCalls(breaks_when_decoded=True, is_endless=True)

    async def three_pieces_of_an_endless_answer() -> None:
        async for _ in generated(a_pipeline(nodes), a_call(max_tokens=3), NO_DEADLINE):
            pass

    async def meanwhile() -> None:
        asking = asyncio.ensure_future(three_pieces_of_an_endless_answer())
        await nodes.decode_told_all.wait()
        for _ in range(20):
            await asyncio.sleep(0)  # for all that follows from it
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(meanwhile())

    assert [requested.handoff_id.attempt for requested in nodes.received] == [1, 1]


def test_a_first_token_that_arrives_last_is_awaited() -> None:
    nodes = FakeNodeCalls(is_prefill_late=True)

    token_ids, finish = asyncio.run(run(a_pipeline(nodes), a_call()))

    assert token_ids == expected_tokens(nodes)
    assert finish.served.attempts == 1


@pytest.mark.parametrize(
    "nodes",
    [
        FakeNodeCalls(),
        FakeNodeCalls(is_prompt_late=True),
        FakeNodeCalls(prompt_faults=[NodeFailed("gone")]),
        FakeNodeCalls(is_prompt_late=True, prompt_faults=[NodeFailed("gone")]),
        FakeNodeCalls(decode_breaks_after=[3]),
    ],
    ids=["in turn", "behind all tokens", "broken off", "behind, and broken off", "decode breaks"],
)
def test_prompt_logprobs_are_sent_once_and_before_the_tokens(
    nodes: FakeNodeCalls,
) -> None:
    sampling = SamplingParams(max_tokens=6, prompt_logprobs=0)
    call = GenerateCall("a", TokenPrompt(PROMPT), sampling)

    async def chunks() -> list[TokenChunk]:
        parts = [part async for part in generated(a_pipeline(nodes), call, NO_DEADLINE)]
        return [part for part in parts if isinstance(part, TokenChunk)]

    first, *others = asyncio.run(chunks())

    assert list(first.prompt_logprobs) == prompt_logprobs_of(nodes.received[0].request)
    assert [chunk for chunk in others if chunk.prompt_logprobs] == []
    token_ids = [token for chunk in (first, *others) for token in chunk.token_ids]
    assert token_ids == expected_tokens(nodes)


def test_buffered_tokens_are_emitted_as_one_chunk_before_a_later_failure() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[4])

    async def chunks() -> list[TokenChunk]:
        call = a_call(max_tokens=8)
        parts = [part async for part in generated(a_pipeline(nodes), call, RequestContext(0.0))]
        return [part for part in parts if isinstance(part, TokenChunk)]

    reported = asyncio.run(chunks())

    token_ids = [token_id for chunk in reported for token_id in chunk.token_ids]
    assert token_ids == expected_tokens(nodes, 8)
    assert len(reported) < 8
    again = [requested for requested in nodes.received if requested.handoff_id.attempt == 2]
    assert again[-1].request.prior_output_token_ids == tuple(token_ids[:4])


def test_a_client_that_does_not_read_gets_the_buffered_tokens_and_an_error() -> None:
    nodes = FakeNodeCalls()
    decode = a_node(LegKind.DECODE)
    decode = replace(decode, card=replace(decode.card, max_model_len=3 * MAX_WAITING))
    table = a_table(a_node(LegKind.PREFILL), decode)
    reported: list[TokenChunk] = []

    async def read() -> None:
        call = a_call(max_tokens=2 * MAX_WAITING)
        async for part in generated(a_pipeline(nodes, table), call, RequestContext(0.0)):
            assert isinstance(part, TokenChunk)
            reported.append(part)

    with pytest.raises(ClientTooSlow):
        asyncio.run(read())

    token_ids = [token_id for chunk in reported for token_id in chunk.token_ids]
    # The first token of prefill, its end and both summaries wait there as well.
    assert MAX_WAITING - 4 <= len(token_ids) <= MAX_WAITING
    assert token_ids == expected_tokens(nodes, len(token_ids))
    assert len(nodes.received) == 2  # no second attempt


def test_a_refusal_by_prefill_ends_the_decode_leg_and_reaches_the_client() -> None:
    nodes = FakeNodeCalls(prefill_faults=[InvalidRequest("too long")], is_endless=True)

    with pytest.raises(InvalidRequest, match="too long"):
        asyncio.run(run(a_pipeline(nodes), a_call()))

    assert nodes.left == [LegKind.DECODE]


def test_refusals_of_draining_nodes_do_not_count_as_attempts() -> None:
    names = [f"p{number}" for number in range(6)]
    nodes = FakeNodeCalls(prefill_faults=[NodeDraining("on its way out") for _ in names[1:]])
    table = a_table(a_node(LegKind.DECODE), *(a_node(LegKind.PREFILL, name) for name in names))

    token_ids, finish = asyncio.run(run(a_pipeline(nodes, table), a_call()))

    assert token_ids == expected_tokens(nodes)
    assert finish.served.is_prefill_remote
    assert (
        sorted(requested.node for requested in nodes.received if requested.leg is LegKind.PREFILL)
        == names
    )


def test_the_last_failure_is_reported_when_every_attempt_fails() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[0, 0, 0])

    with pytest.raises(NodeFailed):
        asyncio.run(run(a_pipeline(nodes), a_call()))

    assert [a.handoff_id.attempt for a in nodes.received if a.leg is LegKind.DECODE] == [1, 2, 3]


def test_attempts_with_progress_do_not_count_against_the_limit() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[2, 2, 2, 2])
    table = a_table(a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2"))

    token_ids, finish = asyncio.run(run(a_pipeline(nodes, table), a_call(max_tokens=12)))

    assert token_ids == expected_tokens(nodes, 12)
    assert finish.served.attempts == 5


def test_few_requests_are_retried_in_an_outage() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[0] * 1000)
    table = a_table(a_node(LegKind.DECODE))
    pipeline = a_pipeline(nodes, table, max_in_flight=4)

    async def generate_next() -> None:
        for number in range(100):
            with pytest.raises(NodeFailed):
                await run(pipeline, a_call(str(number)))

    asyncio.run(generate_next())

    assert len(nodes.received) == pytest.approx(100 + 4 + 20, abs=1)


def test_a_repeatedly_failing_node_is_avoided_and_later_used_again() -> None:
    nodes = FakeNodeCalls(prefill_faults=[NodeFailed("broken") for _ in range(3)])
    table = a_table(a_node(LegKind.PREFILL), a_node(LegKind.DECODE))
    now = [0.0]
    pipeline = a_pipeline(nodes, table, clock=lambda: now[0])

    async def places(count: int) -> list[bool]:
        return [(await run(pipeline, a_call()))[1].served.is_prefill_remote for _ in range(count)]

    assert asyncio.run(places(4)) == [False] * 4
    num_asked = [requested.leg for requested in nodes.received].count(LegKind.PREFILL)
    now[0] = 100.0

    assert asyncio.run(places(2)) == [True] * 2
    assert num_asked == 3


def test_a_node_that_could_not_load_adapters_stays_in_use() -> None:
    faults = [AdapterNotLoaded("all places are in use") for _ in range(6)]
    nodes = FakeNodeCalls(prefill_faults=list(faults))
    pipeline = a_pipeline(nodes)

    async def serve() -> None:
        for _ in faults:
            token_ids, finish = await run(pipeline, a_call())
            assert token_ids == expected_tokens(nodes)
            assert not finish.served.is_prefill_remote  # the retry avoids the prefill node
        assert (await run(pipeline, a_call()))[1].served.is_prefill_remote

    asyncio.run(serve())


def test_a_request_that_arrived_before_a_reload_gets_the_new_adapter() -> None:
    old, new = AdapterRef("sql", "1", "sql"), AdapterRef("sql", "2", "sql")
    nodes = FakeNodeCalls(prefill_faults=[AdapterNotLoaded("the files have changed")])
    table = a_table_with(new)
    call = replace(a_call(), model=ModelVariant("tiny", old))

    token_ids, _ = asyncio.run(run(a_pipeline(nodes, table), call))

    assert token_ids == expected_tokens(nodes)
    legs = [(each.handoff_id.attempt, each.request.adapter.id) for each in nodes.received]
    assert {*legs} == {(1, "1"), (2, "2")}


def test_a_request_for_an_adapter_can_arrive_before_the_nodes() -> None:
    adapter = AdapterRef("sql", "1", "sql")
    nodes, table, there = FakeNodeCalls(), NodeTable(), a_table_with(adapter)
    pipeline = a_pipeline(nodes, table, node_patience_s=PATIENCE_S)

    def join() -> None:
        for node in there.nodes:
            table.join(node.address, node.card)
            table.note_adapters(node.address, reported_adapters(adapter))
            pipeline.handle_nodes_changed()

    async def serve() -> tuple[list[int], Finish]:
        asyncio.get_running_loop().call_later(0.05, join)
        call = replace(a_call(), model=table.find_model("sql"))
        return await run(pipeline, call)

    token_ids, _ = asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))

    assert token_ids == expected_tokens(nodes)
    assert {each.request.adapter for each in nodes.received} == {adapter}


class LosesAdapters(FakeNodeCalls):
    async def decode(self, *args: Any, **fields: Any) -> None:
        try:
            await super().decode(*args, **fields)
        except NodeFailed as error:
            raise AdapterNotLoaded(str(error)) from error


def test_an_answer_that_has_begun_keeps_its_adapter() -> None:
    old, new = AdapterRef("sql", "1", "sql"), AdapterRef("sql", "2", "sql")
    nodes = LosesAdapters(decode_breaks_after=[3])
    table = a_table_with(new)
    call = replace(a_call(), model=ModelVariant("tiny", old))

    asyncio.run(run(a_pipeline(nodes, table), call))

    assert {each.handoff_id.attempt for each in nodes.received} == {1, 2}
    assert {each.request.adapter for each in nodes.received} == {old}


def test_a_request_that_would_queue_past_its_deadline_is_refused_with_a_delay() -> None:
    ticks = itertools.count()
    pipeline = a_pipeline(
        FakeNodeCalls(is_endless=True), clock=lambda: float(next(ticks)), max_in_flight=1
    )

    async def scenario() -> TooLate:
        async with aclosing(generated(pipeline, a_call("first"), NO_DEADLINE)) as first:
            await anext(first)  # several ticks pass until its first token
            second = asyncio.ensure_future(run(pipeline, a_call("second")))
            patient = RequestContext(0.0, deadline_s=1e6)
            third = asyncio.ensure_future(run(pipeline, a_call("third"), patient))
            await asyncio.sleep(0)
            assert pipeline.traffic.num_waiting == 2
            hurried = RequestContext(0.0, deadline_s=next(ticks) + 2.5)
            with pytest.raises(TooLate) as refusal:
                await run(pipeline, a_call("fourth"), hurried)
            for waiting in (second, third):
                waiting.cancel()
        return refusal.value

    refusal = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))

    assert refusal.retry_after_s > 0
    assert pipeline.traffic.num_waiting == 0


def test_closing_the_answer_early_closes_both_legs_and_frees_the_id() -> None:
    nodes = FakeNodeCalls(is_endless=True)
    pipeline = a_pipeline(nodes)

    async def close_then_drain() -> None:
        async with aclosing(generated(pipeline, a_call(), RequestContext(0.0))) as parts:
            async for _ in parts:
                break
        await pipeline.drain()

    asyncio.run(asyncio.wait_for(close_then_drain(), timeout=30))

    assert nodes.left == [LegKind.DECODE]


def test_both_legs_of_every_attempt_get_the_remaining_deadline() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[1])
    table = a_table(
        a_node(LegKind.PREFILL), a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2")
    )

    asyncio.run(run(a_pipeline(nodes, table), a_call(), RequestContext(0.0, deadline_s=100.0)))

    reported = {(requested.handoff_id.attempt, requested.timeout_s) for requested in nodes.received}
    (first, first_s), (second, second_s) = sorted(reported)
    assert (first, second) == (1, 2)
    assert first_s is not None
    assert second_s is not None
    assert 0 < second_s < first_s < 100
    assert len(nodes.received) == 4


def test_a_request_that_cannot_complete_by_its_deadline_is_refused() -> None:
    ticks = itertools.count()
    pipeline = a_pipeline(FakeNodeCalls(), clock=lambda: float(next(ticks)))

    async def scenario() -> TooLate:
        await run(pipeline, a_call("shows how long an answer takes"))
        async with aclosing(generated(pipeline, a_call("under way"), NO_DEADLINE)) as under_way:
            await anext(under_way)
            hurried = RequestContext(0.0, deadline_s=next(ticks) + 3.0)
            with pytest.raises(TooLate, match=r"the answer take .* 25% in reserve") as refusal:
                await run(pipeline, a_call("long"), hurried)
            return refusal.value

    assert asyncio.run(scenario()).retry_after_s > 0


def test_a_request_queued_past_its_deadline_reaches_no_node() -> None:
    ticks, slept_s = itertools.count(), 0.0
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes, clock=lambda: slept_s + float(next(ticks)), max_in_flight=2)

    async def scenario() -> None:
        nonlocal slept_s
        async for _ in generated(pipeline, a_call("takes a hundred seconds"), NO_DEADLINE):
            slept_s += 100.0
        beside = generated(pipeline, a_call("beside"), NO_DEADLINE)
        await anext(beside)
        async with aclosing(generated(pipeline, a_call("under way"), NO_DEADLINE)) as under_way:
            await anext(under_way)
            patient = RequestContext(0.0, deadline_s=10_000.0)
            waiting = asyncio.ensure_future(run(pipeline, a_call("waits"), patient))
            await asyncio.sleep(0)
            assert pipeline.traffic.num_waiting == 1
            slept_s = 9950.0 - next(ticks)
        with pytest.raises(TooLate):
            await waiting
        await beside.aclose()

    asyncio.run(scenario())

    assert len({requested.handoff_id for requested in nodes.received}) == 3


def test_a_lone_request_runs_until_its_deadline() -> None:
    """Otherwise one slow answer would cause all requests to be refused, with no new measurement."""
    ticks, slept_s = itertools.count(), 0.0
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes, clock=lambda: slept_s + float(next(ticks)))

    async def scenario() -> list[int]:
        nonlocal slept_s
        async for _ in generated(pipeline, a_call("takes a hundred seconds"), NO_DEADLINE):
            slept_s += 100.0
        hurried = RequestContext(0.0, deadline_s=slept_s + next(ticks) + 50.0)
        return (await run(pipeline, a_call("alone"), hurried))[0]

    assert asyncio.run(scenario()) == expected_tokens(nodes)


def test_concurrent_requests_are_limited_by_the_batches_of_the_nodes() -> None:
    prefill, decode = a_node(LegKind.PREFILL), a_node(LegKind.DECODE)
    table = a_table(prefill, replace(decode, card=replace(decode.card, max_num_seqs=2)))
    pipeline = a_pipeline(FakeNodeCalls(is_endless=True), table, max_in_flight=None)
    pipeline.handle_nodes_changed()

    async def scenario() -> tuple[int, int]:
        asking = [asyncio.ensure_future(run(pipeline, a_call(name))) for name in "abc"]
        await asyncio.sleep(0)
        counts = pipeline.traffic.num_in_flight, pipeline.traffic.num_waiting
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return counts

    assert asyncio.run(scenario()) == (2, 1)


def test_a_request_without_remaining_time_reaches_no_node() -> None:
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes)

    with pytest.raises(DeadlineExceeded):
        asyncio.run(run(pipeline, a_call(), RequestContext(0.0, deadline_s=0.5)))

    assert nodes.received == []


def test_a_leg_that_times_out_ends_the_other_leg_and_is_not_retried() -> None:
    nodes = FakeNodeCalls(prefill_faults=[DeadlineExceeded("over")], is_endless=True)

    with pytest.raises(DeadlineExceeded, match="over"):
        asyncio.run(run(a_pipeline(nodes), a_call()))

    assert nodes.left == [LegKind.DECODE]
    assert {requested.handoff_id.attempt for requested in nodes.received} == {1}


def test_an_id_is_refused_only_while_it_is_in_use() -> None:
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes)

    async def twice_at_once_then_again() -> None:
        async with aclosing(generated(pipeline, a_call("x"), RequestContext(0.0))) as parts:
            await anext(parts)
            with pytest.raises(RequestIdInUse):
                await run(pipeline, a_call("x"))
        await run(pipeline, a_call("x"))

    asyncio.run(twice_at_once_then_again())


def test_requests_with_the_same_client_id_share_no_hand_off_id() -> None:
    nodes = FakeNodeCalls()

    async def by_two_routers_and_again() -> None:
        one, other = a_pipeline(nodes), a_pipeline(nodes)
        await asyncio.gather(run(one, a_call("x")), run(other, a_call("x")))
        await run(one, a_call("x"))

    asyncio.run(by_two_routers_and_again())

    legs_by_handoff = Counter(requested.handoff_id for requested in nodes.received)
    assert list(legs_by_handoff.values()) == [2, 2, 2]
    assert all(handoff_id.request_id.startswith("x.") for handoff_id in legs_by_handoff)


def test_unservable_requests_are_refused_before_any_node_is_called() -> None:
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes)
    text = GenerateCall("t", TextPrompt("hi"), SamplingParams())

    for call, refusal in (
        (a_call(prompt=()), EmptyPrompt),
        (a_call(model="other"), UnknownModel),
        (text, UnsupportedInput),
    ):
        with pytest.raises(refusal):
            asyncio.run(run(pipeline, call))
    with pytest.raises(NoNodes):
        asyncio.run(run(a_pipeline(nodes, a_table(a_node(LegKind.PREFILL))), a_call()))

    assert nodes.received == []


def test_a_request_waits_for_the_only_decode_node_to_return_and_continues_there() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[3])
    table = a_table()
    decode = a_node(LegKind.DECODE)
    pipeline = a_pipeline(nodes, table, node_patience_s=PATIENCE_S)

    async def restart_under_way() -> list[int]:
        token_ids: list[int] = []
        async with aclosing(generated(pipeline, a_call(), RequestContext(0.0))) as parts:
            async for part in parts:
                if isinstance(part, TokenChunk):
                    token_ids += part.token_ids
                if len(token_ids) == 3:
                    table.lose(decode.address)
                    asyncio.get_running_loop().call_later(0.05, rejoin)
        return token_ids

    def rejoin() -> None:
        pipeline.handle_nodes_changed()  # of which it is not yet
        table.join(decode.address, decode.card)
        pipeline.handle_nodes_changed()

    token_ids = asyncio.run(asyncio.wait_for(restart_under_way(), PATIENCE_S))

    assert token_ids == expected_tokens(nodes)
    assert [requested.leg for requested in nodes.received].count(LegKind.DECODE) == 2


OTHER = replace(FINGERPRINT, model="the same in int8")


def test_an_answer_is_not_continued_on_another_revision() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[3])
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=OTHER)
    table = a_table(d1, d2)

    token_ids, _ = asyncio.run(run(a_pipeline(nodes, table), a_call()))

    assert [requested.node for requested in nodes.received] == ["d1", "d1"]
    assert token_ids == expected_tokens(nodes)


def test_an_answer_waits_for_its_revision_to_return() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[3])
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=OTHER)
    table = a_table(d1, d2)
    pipeline = a_pipeline(nodes, table, node_patience_s=PATIENCE_S)

    async def restart_under_way() -> list[int]:
        token_ids: list[int] = []
        async with aclosing(generated(pipeline, a_call(), RequestContext(0.0))) as parts:
            async for part in parts:
                if isinstance(part, TokenChunk):
                    token_ids += part.token_ids
                if len(token_ids) == 3:
                    table.lose(d1.address)
                    asyncio.get_running_loop().call_later(0.05, rejoin)
        return token_ids

    def rejoin() -> None:
        pipeline.handle_nodes_changed()
        table.join(d1.address, d1.card)
        pipeline.handle_nodes_changed()

    token_ids = asyncio.run(asyncio.wait_for(restart_under_way(), PATIENCE_S))

    assert token_ids == expected_tokens(nodes)
    assert {requested.node for requested in nodes.received} == {"d1"}


def test_an_answer_whose_revision_does_not_return_ends_with_a_named_error() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[3])
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=OTHER)
    table = a_table(d1, d2)
    pipeline = a_pipeline(nodes, table, node_patience_s=0.01)

    async def lost_under_way() -> None:
        async for _ in generated(pipeline, a_call(), RequestContext(0.0)):
            table.lose(d1.address)

    with pytest.raises(IncompatibleNodes, match="must not go on"):
        asyncio.run(asyncio.wait_for(lost_under_way(), PATIENCE_S))


def test_a_request_waits_for_a_compatible_prefill_node() -> None:
    """The incompatible one may be the first node of a new revision."""
    table = a_table(a_node(LegKind.PREFILL, "p2", fingerprint=OTHER), a_node(LegKind.DECODE))
    prefill = a_node(LegKind.PREFILL)
    nodes = FakeNodeCalls()
    pipeline = a_pipeline(nodes, table, node_patience_s=PATIENCE_S)

    async def join_late() -> bool:
        asking = asyncio.ensure_future(run(pipeline, a_call()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert nodes.received == []
        table.join(prefill.address, prefill.card)
        pipeline.handle_nodes_changed()
        return (await asking)[1].served.is_prefill_remote

    is_remote = asyncio.run(asyncio.wait_for(join_late(), PATIENCE_S))

    assert is_remote


def test_a_request_refused_by_a_draining_node_can_start_on_another_revision() -> None:
    nodes = FakeNodeCalls(prefill_faults=[NodeDraining("on its way out")])
    p1, p2 = a_node(LegKind.PREFILL, "p1"), a_node(LegKind.PREFILL, "p2", fingerprint=OTHER)
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=OTHER)

    asyncio.run(run(a_pipeline(nodes, a_table(p1, p2, d1, d2)), a_call()))

    assert {requested.node for requested in nodes.received[-2:]} == {"p2", "d2"}


def test_the_wait_for_a_node_times_out() -> None:
    table = a_table(a_node(LegKind.PREFILL))

    with pytest.raises(NoNodes):
        asyncio.run(run(a_pipeline(FakeNodeCalls(), table, node_patience_s=0.01), a_call()))


def test_a_draining_router_refuses_new_requests() -> None:
    pipeline = a_pipeline(FakeNodeCalls())

    async def drain_then_generate() -> None:
        await pipeline.drain()
        await run(pipeline, a_call())

    with pytest.raises(Draining):
        asyncio.run(drain_then_generate())


class SlowText(TextBoundary):
    """Tokenizer that blocks on a text until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            assert self.may_end.wait(PATIENCE_S), "the loop was held up"
            return PROMPT
        return super().token_ids(prompt, max_tokens)


def test_a_request_being_tokenized_counts_for_drain_and_holds_its_id() -> None:
    async def overtake() -> tuple[bool, list[int]]:
        text = SlowText()
        pipeline = a_pipeline(FakeNodeCalls(), text=text)
        call = replace(a_call("a"), prompt=TextPrompt("x" * 10_000))
        first = asyncio.ensure_future(run(pipeline, call))
        await asyncio.sleep(0)
        with pytest.raises(RequestIdInUse):
            await run(pipeline, a_call("a"))
        await run(pipeline, a_call("b"))
        draining = asyncio.ensure_future(pipeline.drain())
        await asyncio.sleep(0)
        was_drained = draining.done()
        text.may_end.set()
        await draining
        return was_drained, (await first)[0]

    was_drained, token_ids = asyncio.run(overtake())

    assert not was_drained
    assert len(token_ids) == 6


def test_the_event_loop_runs_while_buffered_logprobs_are_processed() -> None:
    entry = TokenLogprobs(1, -0.5, 1)
    outputs = [Output(RequestId("a"), index, (1,), logprobs=(entry,)) for index in range(3)]

    async def catch_up() -> list[str]:
        events = Events()
        for output in outputs:
            events.put(LegOutput(LegKind.DECODE, (output,)))
        order: list[str] = []
        asyncio.get_running_loop().call_soon(order.append, "another")
        for _ in outputs:
            event = await events.next()
            assert isinstance(event, LegOutput)
            order.append(f"{len(event.outputs)} output")
        return order

    assert asyncio.run(catch_up()) == ["another", "1 output", "1 output", "1 output"]
