"""Routing policy on random nodes: chosen nodes and holders are available and compatible."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from baton.core.legs import GENERATING, LegKind
from baton.router.dispatch.dispatcher import Assignment
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, choose
from baton.router.routing.routing_view import PrefixHolder, RoutingRequest, RoutingView
from baton.router.routing.served_models import Node
from baton.rpc.cached_prefixes import PrefixChanges, pack_names
from baton.rpc.errors import IncompatibleNodes, NoNodes
from baton.rpc.node_info import NodeLoad
from tests.support.node_calls import FINGERPRINT, NAMING, a_node

PROMPT = tuple(range(64))


@dataclass(frozen=True)
class Known:
    """Node as known to the router."""

    role: LegKind
    kind: int
    load: NodeLoad
    num_cached_blocks: int
    has_failed: bool
    is_suspected: bool


knowns = st.builds(
    Known,
    st.sampled_from(GENERATING),
    st.integers(0, 1),
    st.builds(NodeLoad, st.integers(0, 3), st.integers(0, 3), st.just(9), st.booleans()),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
routings = st.builds(
    Routing,
    st.sampled_from(RoutingPolicy),
    st.sampled_from([0, 20]),
    st.integers(0, 9),
    st.booleans(),
)


def table_of(nodes: list[tuple[Node, Known]]) -> NodeTable:
    table = NodeTable()
    for node, known in nodes:
        table.join(node.address, node.card)
        table.note_load(node.address, known.load)
        names = NAMING.names(PROMPT[: known.num_cached_blocks * 16], len(PROMPT))
        table.note_prefixes(node.address, PrefixChanges(1, True, pack_names(names)))
    return table


@given(st.lists(knowns, max_size=6), routings, st.integers(0, 1000))
def test_chosen_nodes_are_available_and_compatible_and_a_refusal_has_its_reason(
    known: list[Known], routing: Routing, number: int
) -> None:
    nodes = [
        (a_node(one.role, f"n{n}", fingerprint=replace(FINGERPRINT, model=str(one.kind))), one)
        for n, one in enumerate(known)
    ]
    table = table_of(nodes)
    failed = frozenset(node.address for node, one in nodes if one.has_failed)
    good = [node for node, one in nodes if not (one.has_failed or one.load.is_draining)]
    decodes = [node for node in good if node.offers(LegKind.DECODE)]
    prefills = [node for node in good if node.offers(LegKind.PREFILL)]
    suspected = frozenset(node.address for node, one in nodes if one.is_suspected)
    all_prefills = [node for node, one in nodes if one.role is LegKind.PREFILL]

    try:
        route = choose(table, routing, RoutingRequest(PROMPT, number), failed, suspected)
    except NoNodes:
        assert not decodes
        return
    except IncompatibleNodes:
        assert not any(d.takes_kv_of(p) for p in all_prefills for d in decodes)
        assert all_prefills
        return

    assert route.last.node in decodes
    if not route.is_split:
        assert route.local_reason
    else:
        assert route.first.node in prefills
        assert route.last.node.takes_kv_of(route.first.node)
    _check_holder(route, dict(nodes), [node for node in good if node.address not in suspected])
    again = choose(table, routing, RoutingRequest(PROMPT, number), failed, suspected)
    assert again == route


def _check_holder(route: Route, known: dict[Node, Known], fit: list[Node]) -> None:
    """Check that the holder has the most of the prompt, and more than the node that computes."""
    computing = route.first.node
    held = {node: 16 * min(3, known[node].num_cached_blocks) for node in known}  # of 63 tokens
    if route.holder is not None:
        assert route.holder.node in fit
        assert route.holder.node.kv_kind == computing.kv_kind
        assert route.holder.num_tokens == held[route.holder.node] > held[computing]
        rivals = [node for node in fit if node.kv_kind == computing.kv_kind]
        assert route.holder.num_tokens == max(held[node] for node in rivals)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30))
def test_no_load_remains_after_every_request_has_ended(
    ends: list[tuple[int, bool]],
) -> None:
    nodes = [a_node(LegKind.PREFILL, "p"), a_node(LegKind.DECODE, "d")]
    table = NodeTable()
    for node in nodes:
        table.join(node.address, node.card)
    assignments: list[Assignment] = []

    for number, (place, is_computed) in enumerate(ends):
        route = choose(table, Routing(), RoutingRequest((number, *PROMPT), number))
        assignments.insert(place % (len(assignments) + 1), Assignment(table, route))
        if is_computed:
            assignments[0].note_prompt_done()
    for assignment in assignments:
        assignment.close()

    loads = [table.node_load(node) for node in nodes]
    assert [(one.num_sent, one.num_sent_tokens) for one in loads] == [(0, 0), (0, 0)]


@given(st.integers(1, 2000), st.integers(0, 125), st.integers(0, 125), st.integers(0, 125))
def test_a_longer_cached_prefix_never_raises_the_cost(
    num_tokens: int, first: int, second: int, num_held_blocks: int
) -> None:
    less, more, num_held = (16 * each for each in (*sorted((first, second)), num_held_blocks))
    holder = PrefixHolder(a_node(LegKind.DECODE), min(num_held, num_tokens - 1))
    costs = []
    for num_cached in (less, more):
        node = a_node(LegKind.PREFILL)
        table = NodeTable()
        table.join(node.address, node.card)
        request = RoutingRequest(tuple(range(num_tokens)))
        expected = {node.address: min(num_cached, num_tokens - 1)}
        holders = {table.kind_number(node.address): holder}
        costs.append(
            RoutingView(table, request, expected=expected, holders=holders).prompt_cost(node)
        )

    assert costs[1] <= costs[0] <= num_tokens
