"""Poisonous requests that crash engines: each crashes two, and all other requests complete."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.legs import GENERATING, LegKind
from baton.core.sampling import SamplingParams
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.dispatch.quarantine import PROVEN_TOKENS
from baton.router.dispatch.retries import DispatchConfig
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestContext
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.values import GenerateCall, TokenChunk, TokenPrompt
from baton.rpc.errors import FailureKind, NodeFailed, PoisonedRequest
from tests.support.crashing_nodes import CrashingNodes, Poison
from tests.support.node_calls import a_node, a_table
from tests.support.profiles import profiles_of

PATIENCE_S = 60
PROMPT = (3, 4, 5)
TICKS_BETWEEN_KILLS = 40  # a node is down for a few of them


@dataclass(frozen=True)
class TimedRequest:
    """One request."""

    num_tokens: int
    after_ticks: int
    poison: Poison | None = None


poisons = st.builds(Poison, st.sampled_from(GENERATING), st.integers(0, PROVEN_TOKENS - 2)).map(
    lambda one: Poison(one.leg, 0 if one.leg is LegKind.PREFILL else one.num_tokens)
)
bystanders = st.builds(TimedRequest, st.integers(1, 30), st.integers(0, 40))
culprits = st.builds(TimedRequest, st.just(30), st.integers(0, 40), poisons)


@dataclass(frozen=True)
class Outcome:
    tokens: dict[int, list[int]]
    errors: dict[int, Exception]
    num_deaths: dict[int, int]  # that each request caused


def simulate(
    requests: list[TimedRequest],
    *,
    num_prefill: int,
    num_decode: int,
    kind: FailureKind,
    kills: Sequence[int] = (),
) -> Outcome:
    """Run the requests; `kills` are numbers of nodes to kill one by one at a fixed interval."""
    prefills = [a_node(LegKind.PREFILL, f"p{n}") for n in range(num_prefill)]
    decodes = [a_node(LegKind.DECODE, f"d{n}") for n in range(num_decode)]
    table = a_table(*prefills, *decodes)
    by_number = {
        number: one.poison for number, one in enumerate(requests) if one.poison is not None
    }
    nodes = CrashingNodes(table, by_number, kind)
    ticks = itertools.count()
    pipeline = nodes.pipeline = Pipeline(
        table=table,
        node_calls=nodes,
        profiles=profiles_of(table),
        clock=lambda: float(next(ticks)),
        config=PipelineConfig(
            DispatchConfig(
                node_patience_s=PATIENCE_S,
                quarantine_patience_s=PATIENCE_S,
                retry_pause_s=0.0,
                routing=Routing(RoutingPolicy.ROUND_ROBIN),
            ),
            AdmissionQueueConfig(1024),
        ),
    )
    tokens: dict[int, list[int]] = {}
    errors: dict[int, Exception] = {}

    async def send_request(number: int, one: TimedRequest) -> None:
        for _ in range(one.after_ticks):
            await asyncio.sleep(0)
        tokens[number] = []
        call = GenerateCall(
            str(number), TokenPrompt((number, *PROMPT)), SamplingParams(max_tokens=one.num_tokens)
        )
        try:
            async for part in pipeline.generate(call, RequestContext(0.0)):
                if isinstance(part, TokenChunk):
                    assert part.first_index == len(tokens[number])
                    tokens[number] += part.token_ids
        except (PoisonedRequest, NodeFailed) as error:
            errors[number] = error

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for number, one in enumerate(requests):
                group.create_task(send_request(number, one))
            for number in kills:
                for _ in range(TICKS_BETWEEN_KILLS):
                    await asyncio.sleep(0)
                nodes.end([*prefills, *decodes][number % (num_prefill + num_decode)])

    asyncio.run(scenario())
    return Outcome(tokens, errors, dict(nodes.num_deaths))


def check(requests: list[TimedRequest], outcome: Outcome, most_deaths: int) -> None:
    for number, one in enumerate(requests):
        if one.poison is None:
            assert number not in outcome.errors, outcome.errors[number]
            first = number + sum(PROMPT)
            expected = [(first + 7 * index) % 100 for index in range(one.num_tokens)]
            assert outcome.tokens[number] == expected
        else:
            assert isinstance(outcome.errors[number], PoisonedRequest)
            assert 1 <= outcome.num_deaths[number] <= most_deaths


@given(
    st.lists(bystanders, max_size=12),
    st.lists(culprits, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_a_poisonous_request_ends_at_most_two_engines_and_bystanders_finish(
    others: list[TimedRequest], poisonous: list[TimedRequest], num_prefill: int, num_decode: int
) -> None:
    requests = [*others, *poisonous]

    outcome = simulate(
        requests, num_prefill=num_prefill, num_decode=num_decode, kind=FailureKind.ENGINE_FAILED
    )

    check(requests, outcome, most_deaths=2)


@given(
    st.lists(bystanders, max_size=12),
    st.lists(culprits, max_size=2),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_a_request_that_makes_nodes_vanish_ends_at_most_three_and_bystanders_finish(
    others: list[TimedRequest], poisonous: list[TimedRequest], num_prefill: int, num_decode: int
) -> None:
    requests = [*others, *poisonous]

    outcome = simulate(
        requests, num_prefill=num_prefill, num_decode=num_decode, kind=FailureKind.VANISHED
    )

    check(requests, outcome, most_deaths=3)


@pytest.mark.parametrize("num_tokens", [2, 10, 25])
@pytest.mark.parametrize("num_others", [0, 1, 12])
def test_progress_does_not_exempt_a_poisonous_request(num_tokens: int, num_others: int) -> None:
    """Each attempt generates tokens before the engine crashes."""
    culprit = TimedRequest(1000, 3, Poison(LegKind.DECODE, num_tokens))
    requests = [culprit, *(TimedRequest(30, 2 * number) for number in range(num_others))]

    outcome = simulate(requests, num_prefill=1, num_decode=2, kind=FailureKind.ENGINE_FAILED)

    check(requests, outcome, most_deaths=2 if num_tokens < PROVEN_TOKENS or not num_others else 3)


@given(
    st.lists(bystanders, min_size=1, max_size=12),
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_killing_nodes_makes_no_request_suspect(
    requests: list[TimedRequest], kills: list[int], num_prefill: int, num_decode: int
) -> None:
    outcome = simulate(
        requests,
        num_prefill=num_prefill,
        num_decode=num_decode,
        kind=FailureKind.VANISHED,
        kills=kills,
    )

    check(requests, outcome, most_deaths=0)


DECODE_POISON = TimedRequest(30, 0, Poison(LegKind.DECODE, 1))
LATER_PREFILL_POISON = TimedRequest(30, 14, Poison(LegKind.PREFILL, 0))


def test_a_request_whose_two_nodes_vanish_at_once_is_judged_by_both() -> None:
    """Another poison ends the decode node while this one ends the prefill node."""
    requests = [DECODE_POISON, LATER_PREFILL_POISON]

    outcome = simulate(requests, num_prefill=1, num_decode=1, kind=FailureKind.VANISHED)

    check(requests, outcome, most_deaths=3)


def test_a_bystander_of_two_poisonous_requests_survives_three_lost_nodes() -> None:
    bystander = TimedRequest(5, 6)
    poison = TimedRequest(30, 0, Poison(LegKind.DECODE, 2))
    requests = [bystander, poison, LATER_PREFILL_POISON]

    outcome = simulate(requests, num_prefill=1, num_decode=2, kind=FailureKind.VANISHED)

    check(requests, outcome, most_deaths=3)
