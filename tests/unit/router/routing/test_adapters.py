"""Adapters: what their names mean, which nodes can serve them, and which are preferred."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.core.ids import AdapterRef, ModelVariant
from baton.core.legs import LegKind
from baton.core.request import EMBED
from baton.router.dispatch.dispatcher import Assignment
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, choose
from baton.router.routing.routing_view import ADAPTER_LOAD_COST, DECODE_COST_TOKENS, RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc import adapters
from baton.rpc.adapters import NameOrder
from baton.rpc.errors import NoNodes
from tests.support.node_calls import a_node, a_table, reported_adapters

PROMPT = tuple(range(100))
SQL, NEW_SQL = AdapterRef("sql", "1", "sql"), AdapterRef("sql", "2", "sql")
CHAT = AdapterRef("chat", "3", "chat")
FIXED = AdapterRef("fixed", "4")  # without a path: given to some nodes at their start
ALL = ("p0:1", "p1:1", "d0:1", "d1:1")


def adapter_node(role: LegKind, name: str, max_loras: int) -> Node:
    node = a_node(role, name)
    return replace(node, card=replace(node.card, max_loras=max_loras))


def a_cluster(max_loras: int = 2) -> NodeTable:
    return a_table(
        *(adapter_node(LegKind.PREFILL, f"p{n}", max_loras) for n in range(2)),
        *(adapter_node(LegKind.DECODE, f"d{n}", max_loras) for n in range(2)),
    )


def report(table: NodeTable, address: str, *adapters: AdapterRef, **fields: Any) -> None:
    table.note_adapters(address, reported_adapters(*adapters, **fields))


def request_for(adapter: AdapterRef, number: int = 0) -> RoutingRequest:
    return RoutingRequest(PROMPT, number=number, model=ModelVariant("tiny", adapter))


def pair_of(route: Route) -> tuple[str, str]:
    return "" if not route.is_split else route.first.node.address, route.last.node.address


def pairs(table: NodeTable, adapter: AdapterRef, routing: Routing) -> set[tuple[str, str]]:
    return {pair_of(choose(table, routing, request_for(adapter, number))) for number in range(8)}


# --- names ---------------------------------------------------------------------------


def test_names_resolve_to_adapters_with_the_limits_of_their_base() -> None:
    table = a_cluster()
    report(table, "p0:1", SQL, on_disk=[CHAT])

    assert table.find_model("sql") == ModelVariant("tiny", SQL)
    assert table.find_model("chat") == ModelVariant("tiny", CHAT)
    assert table.find_model("") == ModelVariant("tiny")
    assert table.served_model(table.find_model("sql")) == table.served_model(ModelVariant("tiny"))
    assert (table.served.names, list(table.models)) == (["tiny", "chat", "sql"], ["tiny"])
    assert table.batch_slots() == {"tiny": 0}


def test_a_name_is_forgotten_with_the_last_node_that_reports_it() -> None:
    table = a_cluster()
    report(table, "p0:1", SQL)
    report(table, "d0:1", SQL)

    table.lose("p0:1")
    assert table.find_model("sql").adapter == SQL
    report(table, "d0:1")
    assert table.find_model("sql") == ModelVariant("sql")  # unknown


def test_a_base_model_keeps_its_name() -> None:
    table = a_cluster()
    report(table, "p0:1", AdapterRef("tiny", "1", "x"))

    assert table.find_model("tiny") == ModelVariant("tiny")


def join(table: NodeTable, address: str) -> None:
    role = LegKind.PREFILL if address.startswith("p") else LegKind.DECODE
    table.join(address, adapter_node(role, address.partition(":")[0], 2).card)


def test_a_name_means_the_last_order_whatever_most_nodes_have() -> None:
    table = a_cluster()
    for address in ALL:
        report(table, address, SQL, number=2)
    report(table, "d0:1", NEW_SQL, number=4)
    assert table.find_model("sql").adapter == NEW_SQL
    assert table.adapters.lacking("p0:1") == [NameOrder("sql", 4, NEW_SQL)]

    table.lose("d0:1")  # the only one that has it
    assert table.find_model("sql").adapter == NEW_SQL
    join(table, "d0:1")
    report(table, "d0:1", SQL, number=2)
    assert table.find_model("sql").adapter == NEW_SQL

    report(table, "p0:1", SQL, number=6)  # the old one is loaded again
    assert table.find_model("sql").adapter == SQL
    assert table.adapters.lacking("p0:1") == []


def test_a_node_that_has_taken_orders_does_not_lack_them_until_it_is_another_process() -> None:
    table = a_cluster()
    table.note_name("tiny", NameOrder("sql", 2, SQL))
    assert table.find_model("sql").adapter == SQL
    orders = table.adapters.lacking("p0:1")
    assert orders == [NameOrder("sql", 2, SQL)]

    table.adapters.note_sent("p0:1", orders)
    assert table.adapters.lacking("p0:1") == []
    assert table.adapters.nodes_with("sql") == 1

    join(table, "p0:1")
    assert table.adapters.lacking("p0:1") == orders


@pytest.mark.parametrize("number", [0, 2], ids=["start", "load"])
def test_a_removed_name_means_nothing_although_nodes_have_it(number: int) -> None:
    table = a_cluster()
    report(table, "p0:1", removed={"sql": 4})
    for address in ("p1:1", "d0:1"):
        report(table, address, SQL, number=number)

    assert table.find_model("sql") == ModelVariant("sql")  # unknown
    table.lose("p0:1")
    join(table, "d0:1")
    report(table, "d0:1", SQL, number=number)
    assert table.find_model("sql") == ModelVariant("sql")
    # Those without the name remember it, too, for the routers that come later.
    for address in ("p1:1", "d0:1", "d1:1"):
        assert table.adapters.lacking(address) == [NameOrder("sql", 4)]

    report(table, "p1:1", NEW_SQL, number=6)
    assert table.find_model("sql").adapter == NEW_SQL


def test_of_adapters_of_starts_a_name_means_what_most_nodes_have() -> None:
    table = a_cluster()
    report(table, "p0:1", NEW_SQL)
    report(table, "p1:1", SQL)
    report(table, "d0:1", SQL)
    assert table.find_model("sql").adapter == SQL
    assert [table.adapters.lacking(address) for address in ALL] == [[]] * len(ALL)

    report(table, "p1:1")
    assert table.find_model("sql").adapter == NEW_SQL  # of as many, always the same one
    report(table, "p1:1", SQL, number=2)
    assert table.find_model("sql").adapter == SQL


def test_the_number_of_an_order_is_higher_than_all_of_its_name_whatever_the_clock_is() -> None:
    table = a_cluster()
    assert table.adapters.next_number("sql", 7) == 7
    report(table, "p0:1", SQL, number=101)
    assert table.adapters.next_number("sql", 9) == 102
    report(table, "p0:1", removed={"sql": 110})
    assert table.adapters.next_number("sql", 9) == 111
    table.lose("p0:1")
    assert table.adapters.next_number("sql", 9) == 111


def test_a_name_with_a_number_days_ahead_does_not_raise_those_of_others() -> None:
    table = a_cluster()
    report(table, "p0:1", SQL, number=1_000_000)
    assert table.adapters.next_number("other", 10) == 10
    assert table.adapters.next_number("sql", 10) == 1_000_001


def test_removals_are_remembered_of_a_limited_number_of_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "MAX_REMOVED", 1)
    table = a_cluster()
    for name, number in (("sql", 4), ("chat", 6)):
        table.note_name("tiny", NameOrder(name, number))

    report(table, "p0:1", SQL, CHAT, number=2)

    assert table.find_model("sql").adapter == SQL
    assert table.find_model("chat") == ModelVariant("chat")


def test_a_name_whose_removal_only_nodes_remember_means_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "MAX_REMOVED", 1)
    table = a_cluster()
    for address in ("p0:1", "p1:1"):
        report(table, address, removed={"sql": 4})
    table.note_name("tiny", NameOrder("chat", 6))

    table.lose("p0:1")

    assert table.find_model("sql") == ModelVariant("sql")
    assert table.served.names == ["tiny"]


def test_a_name_of_two_models_means_the_adapter_of_the_last_order() -> None:
    table = a_cluster()
    other = adapter_node(LegKind.DECODE, "e0", 2)
    table.join(other.address, replace(other.card, model="other"))
    report(table, "p0:1", SQL, number=4)
    report(table, "e0:1", NEW_SQL, number=2)
    assert table.find_model("sql") == ModelVariant("tiny", SQL)

    report(table, "e0:1", NEW_SQL, number=6)
    assert table.find_model("sql") == ModelVariant("other", NEW_SQL)


def test_later_reports_of_a_node_do_not_change_what_a_name_means() -> None:
    table = a_cluster()
    report(table, "p0:1", SQL)
    report(table, "p1:1", NEW_SQL)

    report(table, "p0:1", SQL, CHAT)

    assert table.find_model("sql").adapter == NEW_SQL


def test_adapters_without_a_name_are_not_served_by_it() -> None:
    table = a_cluster()
    report(table, "p0:1", AdapterRef("", "1", "sql"))

    assert table.served.names == ["tiny"]
    assert pairs(table, SQL, Routing()) == {("p0:1", "d0:1"), ("p0:1", "d1:1")}


def test_a_path_that_one_node_reports_is_for_all() -> None:
    table = a_cluster()
    report(table, "p0:1", replace(SQL, path=""))
    report(table, "d0:1", SQL)
    report(table, "d1:1", replace(SQL, path=""))

    assert table.find_model("sql").adapter == SQL


def test_long_lists_of_names_are_cut() -> None:
    table = a_cluster()
    report(table, "p0:1", *(AdapterRef(f"a{n:05}", str(n), "x") for n in range(10_000)))

    listed = table.served.listed()

    assert listed.startswith("tiny, a00000, ")
    assert listed.endswith("and 9981 adapters more")
    assert len(listed) < 250


# --- nodes ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_nodes_without_places_get_no_requests_with_adapters(policy: RoutingPolicy) -> None:
    table = a_cluster()
    for role, name in ((LegKind.PREFILL, "p1"), (LegKind.DECODE, "d0")):
        table.join(f"{name}:1", adapter_node(role, name, 0).card)
    report(table, "p0:1", SQL)

    assert pairs(table, SQL, Routing(policy)) == {("p0:1", "d1:1")}


def test_an_adapter_without_a_path_is_served_by_the_nodes_that_report_it() -> None:
    table = a_cluster()
    for address in ("p1:1", "d0:1"):
        report(table, address, FIXED)

    assert pairs(table, FIXED, Routing(RoutingPolicy.ROUND_ROBIN)) == {("p1:1", "d0:1")}


def test_decode_nodes_alone_serve_an_adapter_that_no_prefill_node_has() -> None:
    table = a_cluster()
    report(table, "d0:1", FIXED)

    route = choose(table, Routing(), request_for(FIXED))

    assert pair_of(route) == ("", "d0:1")
    assert route.local_reason == "no prefill node has adapter 'fixed'"


def test_without_a_node_the_error_names_the_adapter() -> None:
    table = a_cluster(max_loras=0)
    with pytest.raises(NoNodes, match="no decode node with adapter 'sql' is reachable"):
        choose(table, Routing(), request_for(SQL))
    pooled = replace(request_for(SQL), task=EMBED)
    with pytest.raises(NoNodes, match="no node that embeds with adapter 'sql'"):
        choose(table, Routing(), pooled)


# --- preferences -----------------------------------------------------------------------


def test_nodes_that_have_the_adapter_in_memory_are_preferred() -> None:
    table = a_cluster()
    for address in ("p1:1", "d0:1"):
        report(table, address, SQL)
    for address in ("p0:1", "d1:1"):
        report(table, address, on_disk=[SQL])

    assert pairs(table, SQL, Routing()) == {("p1:1", "d0:1")}


def test_an_adapter_is_loaded_on_another_node_when_those_that_have_it_are_busy() -> None:
    table = a_cluster()
    report(table, "d0:1", SQL)
    chosen = []
    for number in range(ADAPTER_LOAD_COST // DECODE_COST_TOKENS + 4):
        route = choose(table, Routing(), request_for(SQL, number))
        Assignment(table, route, SQL.id).note_prompt_done()
        chosen.append(route.last.node.address)

    assert chosen[:8] == ["d0:1"] * 8
    assert "d1:1" in chosen


def test_requests_follow_one_that_is_already_loading_their_adapter() -> None:
    table = a_cluster()
    first = choose(table, Routing(), request_for(SQL))
    assignment = Assignment(table, first, SQL.id)

    second = choose(table, Routing(), request_for(SQL, 1))
    assert pair_of(second) == pair_of(first)

    assignment.close()
    assert pair_of(choose(table, Routing(), request_for(SQL, 2))) != pair_of(first)


def test_a_batch_without_a_place_for_the_adapter_is_avoided() -> None:
    table = a_cluster(max_loras=1)
    for address in ALL:
        report(table, address, SQL, CHAT)
    first = choose(table, Routing(), request_for(CHAT))
    Assignment(table, first, CHAT.id)
    other = choose(table, Routing(), request_for(SQL))

    assert not {*pair_of(first)} & {*pair_of(other)}

    for number in range(3):  # they cost less than a wait for the end of all others
        Assignment(table, other, SQL.id).note_prompt_done()
        assert choose(table, Routing(), request_for(SQL, number)).last.node == other.last.node


def test_requests_without_an_adapter_ignore_them() -> None:
    table, plain = a_cluster(), a_cluster(max_loras=0)
    report(table, "d0:1", SQL)
    request = RoutingRequest(PROMPT, model=ModelVariant("tiny"))

    for number in range(4):
        numbered = replace(request, number=number)
        expected = pair_of(choose(plain, Routing(), numbered))
        assert pair_of(choose(table, Routing(), numbered)) == expected
