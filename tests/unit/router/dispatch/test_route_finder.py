"""Nodes that the route of an attempt names: holders of prefixes, and that of another answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.legs import LegKind
from baton.core.media import DIGEST_BYTES, MediaSegment
from baton.router.dispatch.quarantine import Quarantine, Suspicion
from baton.router.dispatch.retries import BreakerConfig, CircuitBreakers, DispatchConfig
from baton.router.dispatch.route_finder import RouteFinder
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, decoded_on
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc.cached_prefixes import PrefixChanges, pack_names
from tests.support.node_calls import NAMING, a_node, a_table

PROMPT = tuple(range(100))
REQUEST = RoutingRequest(PROMPT)


def a_cluster() -> NodeTable:
    """Return a table of one prefill and two decode nodes, one of which has the prompt."""
    roles = {"p0": LegKind.PREFILL, "d0": LegKind.DECODE, "d1": LegKind.DECODE}
    table = a_table(*(a_node(role, name) for name, role in roles.items()))
    stored = pack_names(NAMING.names(PROMPT, len(PROMPT)))
    table.note_prefixes("d1:1", PrefixChanges(1, True, stored))
    return table


def find(
    table: NodeTable,
    *,
    breakers: CircuitBreakers | None = None,
    quarantine: Quarantine | None = None,
    failed: frozenset[str] = frozenset(),
    request: RoutingRequest = REQUEST,
    prompt_node: Node | None = None,
) -> Route:
    finder = RouteFinder(
        table,
        DispatchConfig(routing=Routing(RoutingPolicy.ROUND_ROBIN), retry_pause_s=0.0),
        breakers or CircuitBreakers(),
        quarantine or Quarantine(lambda: None),
        clock=lambda: 0.0,
    )
    return asyncio.run(finder.find(request, failed, Suspicion(), prompt_node))


def holder_address(route: Route) -> str | None:
    return None if route.holder is None else route.holder.node.address


def test_a_node_with_a_longer_prefix_is_named_as_holder() -> None:
    assert holder_address(find(a_cluster())) == "d1:1"


def test_a_node_with_an_open_breaker_is_not_named_as_holder() -> None:
    breakers = CircuitBreakers(BreakerConfig(num_failures=1))
    breakers.note_failure(["d1:1"], 0.0)

    assert holder_address(find(a_cluster(), breakers=breakers)) is None


def test_a_failed_node_is_not_named_as_holder_even_if_every_node_has_failed() -> None:
    route = find(a_cluster(), failed=frozenset({"p0:1", "d0:1", "d1:1"}))

    assert route.is_split
    assert holder_address(route) is None


def test_a_node_with_an_open_breaker_is_not_named_even_if_all_decode_breakers_are_open() -> None:
    breakers = CircuitBreakers(BreakerConfig(num_failures=1))
    breakers.note_failure(["d0:1", "d1:1"], 0.0)

    assert holder_address(find(a_cluster(), breakers=breakers)) is None
    assert holder_address(find(a_cluster(), breakers=breakers, failed=frozenset({"x:1"}))) is None


def test_a_quarantined_node_is_not_named_as_holder() -> None:
    table, quarantine, suspicion = a_cluster(), Quarantine(lambda: None), Suspicion()
    suspicion.suspect()
    d1 = table.node_at("d1:1")
    assert d1 is not None
    quarantine.track(suspicion, Route(decoded_on(d1)))

    assert holder_address(find(table, quarantine=quarantine)) is None


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize("end", [96, 100])  # of the picture; 96 tokens are in full blocks
def test_the_node_of_another_answer_computes_the_end_of_a_prompt_unless_it_is_a_picture(
    end: int, encodes: bool
) -> None:
    decode = a_node(LegKind.DECODE, "d0")
    decode = replace(decode, card=replace(decode.card, encodes_pictures=encodes))
    prefill = a_node(LegKind.PREFILL, "p0")
    table = a_table(replace(prefill, card=replace(prefill.card, encodes_pictures=True)), decode)
    media = (MediaSegment(80, end - 80, bytes(DIGEST_BYTES)),)

    route = find(table, request=replace(REQUEST, media=media), prompt_node=decode)

    assert route.is_split is (end == 100 and not encodes)
