"""Requests with several answers, on fake nodes: shared prompt computation and placement."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from baton.core.errors import InvalidRequest
from baton.core.legs import LegKind
from baton.core.output import Finish
from baton.core.sampling import MAX_LOGPROBS, SamplingParams
from baton.router.answers import generate_answers
from baton.router.dispatch.retries import DispatchConfig
from baton.router.dispatch.vllm.prefills import VllmPrefills
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestScopes
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.router.values import (
    GenerateCall,
    TokenChunk,
    TokenPrompt,
)
from baton.rpc.errors import NodeDraining, NodeFailed, PoisonedRequest
from baton.rpc.node_info import NodeLoad
from tests.support.crashing_nodes import CrashingNodes, Poison
from tests.support.fake_prefills import FakePrefills
from tests.support.node_calls import (
    FINGERPRINT,
    NAMING,
    FakeNodeCalls,
    a_node,
    a_table,
    prompt_logprobs_of,
    token_at,
)
from tests.support.profiles import profiles_of

PROMPT = tuple(range(1, 36))  # two blocks of 16, and three tokens


def calls_of(
    count: int, *, prompt: tuple[int, ...] = PROMPT, name: str = "a", max_tokens: int = 6
) -> list[GenerateCall]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [
        GenerateCall(f"{name}-{index}", TokenPrompt(prompt), replace(sampling, seed=index))
        for index in range(count)
    ]


@dataclass(frozen=True)
class Remaining:
    """A call with this time until its deadline."""

    seconds: float | None

    def time_remaining(self) -> float | None:
        return self.seconds


def a_pipeline(
    nodes: FakeNodeCalls, table: NodeTable, vllm: VllmPrefills | None = None
) -> Pipeline:
    ticks = itertools.count()
    dispatch = DispatchConfig(retry_pause_s=0.0, routing=Routing(RoutingPolicy.ROUND_ROBIN))
    return Pipeline(
        table=table,
        node_calls=nodes,
        profiles=profiles_of(table),
        clock=lambda: float(next(ticks)),
        config=PipelineConfig(dispatch),
        foreign_prefills=() if vllm is None else (vllm,),
    )


def parts_of(
    nodes: FakeNodeCalls,
    calls: list[GenerateCall],
    table: NodeTable | None = None,
    *,
    num_each: int | None = None,
    remaining_s: float | None = None,
    vllm: VllmPrefills | None = None,
) -> list[tuple[int, TokenChunk | Finish]]:
    """Return all parts of all answers, in order of arrival."""

    async def run() -> list[tuple[int, TokenChunk | Finish]]:
        pipeline = a_pipeline(nodes, table or a_table(), vllm)
        scope = RequestScopes().begin("a", None, Remaining(remaining_s))
        answers = generate_answers(pipeline, scope, calls, num_each or len(calls))
        async with aclosing(answers) as parts:
            return [indexed async for indexed in parts]

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_another_request_can_have_the_id_of_an_answer() -> None:
    """Answers are named after their request: `a-0` is also an id that a client may choose."""

    async def run() -> int:
        pipeline = a_pipeline(FakeNodeCalls(), a_table())
        with pipeline.accept("a-0"):
            scope = RequestScopes().begin("a", None)
            async with aclosing(generate_answers(pipeline, scope, calls_of(2), 2)) as parts:
                return len({index async for index, _ in parts})

    assert asyncio.run(run()) == 2


def answered(
    nodes: FakeNodeCalls,
    calls: list[GenerateCall],
    table: NodeTable | None = None,
    *,
    num_each: int | None = None,
    remaining_s: float | None = None,
) -> dict[int, tuple[list[int], Finish]]:
    """Return the tokens and the summary of each answer."""
    token_ids: dict[int, list[int]] = {index: [] for index in range(len(calls))}
    finishes: dict[int, Finish] = {}
    for index, part in parts_of(nodes, calls, table, num_each=num_each, remaining_s=remaining_s):
        if isinstance(part, Finish):
            finishes[index] = part
        else:
            token_ids[index] += part.token_ids
    return {index: (token_ids[index], finish) for index, finish in finishes.items()}


def expected(nodes: FakeNodeCalls, count: int = 6) -> list[int]:
    return [token_at(nodes.received[0].request, index) for index in range(count)]


def legs(nodes: FakeNodeCalls) -> tuple[int, int]:
    """Return the numbers of prefill and decode calls."""
    num_prefills = sum(requested.leg is LegKind.PREFILL for requested in nodes.received)
    return num_prefills, len(nodes.received) - num_prefills


def test_the_prompt_is_computed_once_and_the_other_answers_run_on_its_node() -> None:
    nodes = FakeNodeCalls()
    table = a_table(
        *(a_node(LegKind.PREFILL, f"p{n}") for n in range(2)),
        *(a_node(LegKind.DECODE, f"d{n}") for n in range(3)),
    )

    answers = answered(nodes, calls_of(4), table)

    assert legs(nodes) == (1, 4)
    assert (
        len({requested.node for requested in nodes.received if requested.leg is LegKind.DECODE})
        == 1
    )
    assert [tokens for tokens, _ in answers.values()] == [expected(nodes)] * 4
    assert len({requested.handoff_id for requested in nodes.received}) == 4
    assert sorted(
        requested.request.seed for requested in nodes.received if requested.leg is LegKind.DECODE
    ) == [*range(4)]
    places = [finish.served.is_prefill_remote for _, finish in answers.values()]
    assert places.count(True) == 1


def test_other_answers_use_the_kv_that_a_vllm_server_computed_for_the_first() -> None:
    nodes, table = FakeNodeCalls(), a_table(a_node(LegKind.DECODE, "d0"))
    prefills = FakePrefills(table, "d0:1")

    parts_of(nodes, calls_of(3, prompt=tuple(range(1, 100))), table, vllm=prefills)

    assert prefills.num_asked == 1
    assert [each.request.foreign_kv is None for each in nodes.received] == [False, True, True]
    assert {each.request.cache_salt for each in nodes.received} == {"vllm!"}


def test_a_shared_prompt_adds_only_its_last_block_to_the_load() -> None:
    table = a_table()
    [decode] = table.open_nodes(LegKind.DECODE)
    seen: list[int] = []

    class Watching(FakeNodeCalls):
        async def decode(self, *args: object, **more: object) -> None:
            seen.append(table.node_load(decode).num_sent_tokens)
            await super().decode(*args, **more)  # type: ignore[arg-type]

    answered(Watching(), calls_of(2), table)

    assert seen == [0, 3]


def test_other_answers_do_not_wait_if_the_first_ends_with_its_first_token() -> None:
    nodes = FakeNodeCalls()

    answers = answered(nodes, calls_of(3, max_tokens=1))

    assert [tokens for tokens, _ in answers.values()] == [expected(nodes, 1)] * 3


def test_a_retry_of_the_first_answer_moves_the_others_with_it() -> None:
    nodes = FakeNodeCalls(prefill_faults=[NodeFailed("gone")], decode_breaks_after=[0])

    answers = answered(nodes, calls_of(3))

    assert [tokens for tokens, _ in answers.values()] == [expected(nodes)] * 3
    # The failed prefill node is not called again; decode computes the prompt, once.
    assert legs(nodes) == (1, 4)


def test_other_answers_do_not_wait_if_the_first_is_refused() -> None:
    nodes = FakeNodeCalls(prefill_faults=[InvalidRequest("too long")] * 3)

    with pytest.raises(InvalidRequest, match="too long"):
        answered(nodes, calls_of(3))


def without_prefixes(node: Node) -> Node:
    return replace(node, card=replace(node.card, prefix_naming=None))


def with_snapshots(node: Node) -> Node:
    naming = replace(NAMING, needs_snapshot=True)
    return replace(node, card=replace(node.card, prefix_naming=naming))


def with_room_for_one(node: Node) -> Node:
    return replace(node, card=replace(node.card, max_num_seqs=1))


@pytest.mark.parametrize("made", [without_prefixes, with_snapshots, with_room_for_one])
def test_answers_are_routed_separately_if_the_prompt_cannot_be_shared(
    made: object,
) -> None:
    assert callable(made)
    table = a_table(
        a_node(LegKind.PREFILL), *(made(a_node(LegKind.DECODE, f"d{n}")) for n in range(2))
    )

    class Slow(FakeNodeCalls):
        """Nodes whose first answer is still in progress when the second chooses a node."""

        async def decode(self, *args: object, **more: object) -> None:
            await super().decode(*args, **more)  # type: ignore[arg-type]
            await asyncio.sleep(0)

    nodes = Slow()

    answered(nodes, calls_of(2), table)

    assert legs(nodes) == (2, 2)


def test_prompts_are_shared_only_between_answers_of_one_request() -> None:
    nodes = FakeNodeCalls()
    calls = calls_of(2) + calls_of(2, prompt=PROMPT[::-1][:20], name="b")

    answers = answered(nodes, calls, num_each=2)

    assert legs(nodes) == (2, 4)
    assert answers[0][0] == answers[1][0] != answers[2][0] == answers[3][0]


def with_prompt_logprobs(calls: list[GenerateCall], count: int = 1) -> list[GenerateCall]:
    return [replace(call, sampling=replace(call.sampling, prompt_logprobs=count)) for call in calls]


def test_prompt_logprobs_are_computed_once_and_returned_with_each_answer() -> None:
    nodes = FakeNodeCalls()

    parts = [part for _, part in parts_of(nodes, with_prompt_logprobs(calls_of(3)))]

    assert legs(nodes) == (1, 3)
    requested = [one.request.sampling.prompt_logprobs for one in nodes.received]
    assert requested == [1, 1, None, None]
    reported = [part.prompt_logprobs for part in parts if isinstance(part, TokenChunk)]
    assert reported.count(tuple(prompt_logprobs_of(nodes.received[0].request))) == 3
    assert len(reported) - reported.count(()) == 3


def test_all_answers_of_a_request_share_one_limit_on_prompt_logprobs() -> None:
    long = (1,) * 500
    one = with_prompt_logprobs(calls_of(17, prompt=long), MAX_LOGPROBS)
    two = one[:9] + with_prompt_logprobs(calls_of(9, prompt=long, name="b"), MAX_LOGPROBS)
    nodes = FakeNodeCalls()

    with pytest.raises(InvalidRequest, match="17 answers to 500 prompt tokens repeat 552500"):
        parts_of(nodes, one)
    with pytest.raises(InvalidRequest, match="and 231788 are left"):
        parts_of(FakeNodeCalls(), two, num_each=9)
    assert nodes.received == []
    assert len(answered(nodes, one[:16])) == 16


def test_all_answers_have_the_deadline_of_the_client() -> None:
    nodes = FakeNodeCalls()

    answered(nodes, calls_of(3), remaining_s=1e6)

    timeouts = [requested.timeout_s for requested in nodes.received]
    assert len(timeouts) == 4
    assert None not in timeouts


def decodes_of(nodes: FakeNodeCalls) -> list[str]:
    return [requested.node for requested in nodes.received if requested.leg is LegKind.DECODE]


def two_decodes() -> NodeTable:
    decodes = (a_node(LegKind.DECODE, f"d{n}") for n in range(2))
    return a_table(a_node(LegKind.PREFILL), *decodes)


def test_a_failed_second_answer_continues_on_another_node() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[100, 2])

    answers = answered(nodes, calls_of(2), two_decodes())

    assert [tokens for tokens, _ in answers.values()] == [expected(nodes)] * 2
    first, beside, again = decodes_of(nodes)
    assert first == beside != again


def test_other_answers_avoid_a_draining_decode_node() -> None:
    table = two_decodes()

    class Draining(FakeNodeCalls):
        async def decode(self, node: Node, *args: object, **more: object) -> None:
            if not decodes_of(self):
                table.note_load(node.address, NodeLoad(is_draining=True))
            await super().decode(node, *args, **more)  # type: ignore[arg-type]

    nodes = Draining()

    answered(nodes, calls_of(2), table)

    first, other = decodes_of(nodes)
    assert first != other


def test_all_answers_come_from_one_revision_of_the_model() -> None:
    d1 = a_node(LegKind.DECODE, "d1")
    full = replace(d1, card=replace(d1.card, max_num_seqs=1))
    other = replace(FINGERPRINT, model="the same in int8")
    nodes = FakeNodeCalls()

    answered(nodes, calls_of(4), a_table(full, a_node(LegKind.DECODE, "d2", fingerprint=other)))

    assert [requested.node for requested in nodes.received] == ["d1"] * 4


def test_answers_can_start_on_another_revision_before_any_token() -> None:
    other = replace(FINGERPRINT, model="the same in int8")
    p1, p2 = (
        a_node(LegKind.PREFILL, "p1"),
        a_node(LegKind.PREFILL, "p2", fingerprint=other),
    )
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=other)
    nodes = FakeNodeCalls(prefill_faults=[NodeDraining("on its way out")])

    answered(nodes, calls_of(3), a_table(p1, p2, d1, d2))

    assert decodes_of(nodes) == ["d1", "d2", "d2", "d2"]


def test_a_draining_router_finishes_answers_that_wait_for_the_first() -> None:
    may_decode = asyncio.Event()

    class Waiting(FakeNodeCalls):
        async def decode(self, *args: object, **more: object) -> None:
            await may_decode.wait()
            await super().decode(*args, **more)  # type: ignore[arg-type]

    async def drain_after_the_first_part() -> int:
        pipeline = a_pipeline(Waiting(), a_table())
        scope = RequestScopes().begin("a", None)
        async with aclosing(generate_answers(pipeline, scope, calls_of(3), 3)) as parts:
            await anext(parts)  # by prefill: no node has the KV yet
            draining = asyncio.ensure_future(pipeline.drain())
            await asyncio.sleep(0)
            may_decode.set()
            num_ended = sum([isinstance(part, Finish) async for _, part in parts])
        await draining
        return num_ended

    assert asyncio.run(asyncio.wait_for(drain_after_the_first_part(), 30)) == 3


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_many_answers_to_a_poisonous_prompt_end_two_engines(num_prefill: int) -> None:
    prefills = [a_node(LegKind.PREFILL, f"p{n}") for n in range(num_prefill)]
    decodes = [a_node(LegKind.DECODE, f"d{n}") for n in range(4)]
    table = a_table(*prefills, *decodes)
    nodes = CrashingNodes(table, {PROMPT[0]: Poison(LegKind.DECODE, 4)})
    ticks = itertools.count()
    nodes.pipeline = Pipeline(
        table=table,
        node_calls=nodes,
        profiles=profiles_of(table),
        clock=lambda: float(next(ticks)),
        config=PipelineConfig(DispatchConfig(node_patience_s=30, retry_pause_s=0.0)),
    )

    async def scenario(pipeline: Pipeline) -> None:
        scope = RequestScopes().begin("a", None)
        async with aclosing(generate_answers(pipeline, scope, calls_of(6), 6)) as parts:
            async for _ in parts:
                pass

    with pytest.raises(PoisonedRequest):
        asyncio.run(asyncio.wait_for(scenario(nodes.pipeline), 30))

    assert nodes.num_deaths == {PROMPT[0]: 2}
