"""Nodes that are named to pull a prefix from, and the price of a pull."""

from __future__ import annotations

from dataclasses import replace

from baton.core.legs import GENERATING, LegKind
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.router.dispatch.dispatcher import Assignment
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, choose, handed_over
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc.cached_prefixes import PrefixChanges, pack_names
from baton.rpc.node_info import NodeLoad
from tests.support.node_calls import NAMING, a_node, a_table, other_layout

PROMPT = tuple(range(1000))  # 62 full blocks of 16, and 8 tokens
REQUEST = RoutingRequest(PROMPT)
OTHER_LAYOUT = other_layout(dtype="bfloat16")


def a_cluster(num_prefill: int = 2, num_decode: int = 1) -> NodeTable:
    prefills = [with_room(a_node(LegKind.PREFILL, f"p{n}")) for n in range(num_prefill)]
    decodes = [with_room(a_node(LegKind.DECODE, f"d{n}")) for n in range(num_decode)]
    return a_table(*prefills, *decodes)


def with_room(node: Node) -> Node:
    return replace(node, card=replace(node.card, num_blocks=1000))


def report(table: NodeTable, name: str, num_blocks: int, naming: PrefixNaming = NAMING) -> None:
    names = naming.names(PROMPT[: 16 * num_blocks], len(PROMPT))
    table.note_prefixes(f"{name}:1", PrefixChanges(1, True, pack_names(names)))


def holder_of(route: Route) -> tuple[str, int] | None:
    """Return the name of the node to pull from, and what it has reported."""
    return None if route.holder is None else (str(route.holder.node.card.node_id), pulled(route))


def pulled(route: Route) -> int:
    return 0 if route.holder is None else route.holder.num_tokens


def test_the_decode_node_with_the_last_answer_is_named_as_holder_to_the_prefill_node() -> None:
    table = a_cluster(1)
    report(table, "p0", 20)
    report(table, "d0", 50)

    route = choose(table, Routing(), REQUEST)

    assert route.is_split
    assert holder_of(route) == ("d0", 800)
    assert route.num_missing_tokens == 200


def test_no_holder_is_named_if_the_computing_node_has_as_long_a_prefix() -> None:
    table = a_cluster(1)
    report(table, "p0", 50)
    report(table, "d0", 50)

    assert choose(table, Routing(), REQUEST).holder is None


def test_no_holder_is_named_if_pulls_are_disabled() -> None:
    table = a_cluster(1)
    report(table, "d0", 50)

    route = choose(table, Routing(kv_pulls=False), REQUEST)

    assert route.holder is None
    assert route.num_missing_tokens == 1000


def test_prefixes_expected_at_another_node_are_not_pulled() -> None:
    table = a_cluster(2)
    Assignment(table, choose(table, Routing(), REQUEST))
    table.note_load("p0:1", NodeLoad(num_waiting=5))

    route = choose(table, Routing(), replace(REQUEST, number=1))

    assert route.is_split
    assert route.first.node.address == "p1:1"
    assert route.holder is None


def test_prefixes_expected_at_the_computing_node_are_not_pulled() -> None:
    table = a_cluster(1)
    report(table, "d0", 50)
    Assignment(table, choose(table, Routing(), REQUEST))

    assert choose(table, Routing(), replace(REQUEST, number=1)).holder is None


def test_draining_unready_avoided_and_suspected_nodes_are_not_pulled_from() -> None:
    table = a_cluster(6)
    for number, num_blocks in enumerate((60, 50, 40, 30, 20)):
        report(table, f"p{number}", num_blocks)
    report(table, "d0", 10)
    table.note_load("p0:1", NodeLoad(is_draining=True))
    table.note_ready("p1:1", is_ready=False)
    avoided, suspected = frozenset({"p2:1"}), frozenset({"p3:1"})
    for name in ("p3", "p4"):
        table.note_load(f"{name}:1", NodeLoad(num_waiting=5))

    route = choose(table, Routing(), REQUEST, avoided, suspected)

    assert route.is_split
    assert holder_of(route) == ("p4", 320)


def test_kv_of_another_layout_is_not_pulled() -> None:
    fitting = with_room(a_node(LegKind.PREFILL, "p-fits"))
    other = with_room(a_node(LegKind.DECODE, "d-other", fingerprint=OTHER_LAYOUT))
    table = a_table(fitting, other, with_room(a_node(LegKind.DECODE, "d-fits")))
    report(table, "d-other", 50)

    alone = choose(table, Routing(), REQUEST)
    report(table, "d-fits", 30)
    both = choose(table, Routing(), REQUEST)

    assert alone.holder is None
    assert alone.num_missing_tokens == 1000
    assert holder_of(both) == ("d-fits", 480)


def test_kv_under_other_names_is_not_pulled() -> None:
    naming = replace(NAMING, model_salt=f"{NAMING.model_salt}:batch-invariant")
    invariant = with_room(a_node(LegKind.DECODE, "d-invariant"))
    invariant = replace(invariant, card=replace(invariant.card, prefix_naming=naming))
    table = a_table(with_room(a_node(LegKind.PREFILL, "p0")), invariant)
    report(table, "d-invariant", 50, naming)

    route = choose(table, Routing(), REQUEST)

    assert route.is_split  # KV is handed over all the same
    assert route.holder is None


def test_a_prefix_is_pulled_up_to_the_last_snapshot_of_its_holder() -> None:
    naming = replace(NAMING, needs_snapshot=True)
    nodes = [with_room(a_node(role)) for role in GENERATING]
    table = a_table(*(replace(n, card=replace(n.card, prefix_naming=naming)) for n in nodes))
    report(table, "decode", 50, naming)

    assert holder_of(choose(table, Routing(), REQUEST)) == ("decode", 800)


def test_a_decode_node_that_computes_the_prompt_pulls_from_another() -> None:
    table = a_cluster(0, 2)
    report(table, "d0", 50)
    table.note_load("d0:1", NodeLoad(num_running=20))

    route = choose(table, Routing(), REQUEST)

    assert route.last.node.address == "d1:1"
    assert holder_of(route) == ("d0", 800)


def test_equally_good_holders_alternate() -> None:
    table = a_cluster(3)
    for name in ("p0", "p1", "d0"):
        report(table, name, 50)
    for name in ("p0", "p1"):
        table.note_load(f"{name}:1", NodeLoad(num_waiting=5))

    routes = [choose(table, Routing(), replace(REQUEST, number=n)) for n in range(3)]

    assert {holder_of(route) for route in routes} == {("p0", 800), ("p1", 800), ("d0", 800)}


def test_load_balance_outweighs_a_pullable_prefix() -> None:
    table = a_cluster(2)
    report(table, "p1", 50)
    busy = RoutingRequest(tuple(range(5000, 5300)))
    other = choose(table, Routing(), busy)
    p1 = table.node_at("p1:1")
    assert p1 is not None
    Assignment(table, replace(other, legs=handed_over(p1, other.last.node)))

    pulling = choose(table, Routing(), REQUEST)
    alone = choose(table, Routing(kv_pulls=False), REQUEST)

    assert pulling.is_split
    assert alone.is_split
    assert (pulling.first.node.address, alone.first.node.address) == ("p0:1", "p1:1")
    assert holder_of(pulling) == ("p1", 800)


def test_a_request_stays_at_its_prefix_on_an_idle_node() -> None:
    table = a_cluster(2)
    report(table, "p1", 50)

    routes = [choose(table, Routing(), replace(REQUEST, number=n)) for n in range(4)]

    assert {route.first.node for route in routes} == {table.node_at("p1:1")}
    assert {route.holder for route in routes} == {None}


def test_every_policy_names_the_holder_of_the_longest_prefix() -> None:
    table = a_cluster(2)
    report(table, "p0", 50)

    routing = Routing(RoutingPolicy.ROUND_ROBIN)
    routes = [choose(table, routing, replace(REQUEST, number=n)) for n in range(2)]

    assert [holder_of(route) for route in routes] == [None, ("p0", 800)]


def test_few_tokens_are_computed_on_decode_if_pulling_the_rest_to_prefill_costs_more() -> None:
    table = a_cluster(1)
    report(table, "d0", 62)
    routing = Routing(local_prefill_below=256)

    few = choose(table, routing, REQUEST)
    more = choose(table, routing, RoutingRequest((*PROMPT, *range(100))))

    assert not few.is_split
    assert few.holder is None
    assert more.is_split
    assert holder_of(more) == ("d0", 992)
