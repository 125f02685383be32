"""Node overview of a router: states and throughput."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.client.node_status import NodeRates, Snapshot, rates_between
from baton.core.ids import AdapterRef
from baton.core.legs import LegKind
from baton.router.discovery.node_reports import report_nodes
from baton.router.routing.node_table import NodeTable
from baton.rpc.adapters import LoadedAdapter, NameOrder, NodeAdapters
from baton.rpc.node_info import (
    STATUS,
    NodeAvailability,
    NodeLoad,
    NodeStatus,
    NodeTotals,
)
from tests.support.node_calls import a_card

DECODE, PREFILL = LegKind.DECODE, LegKind.PREFILL


def a_table(**listed: LegKind) -> NodeTable:
    """Return a table of these addresses; nodes at those that begin with `up` are ready."""
    table = NodeTable()
    table.watched = listed
    for address, kind in listed.items():
        if address.startswith("up"):
            table.join(address, a_card(kind, f"name of {address}"))
    return table


def states(table: NodeTable) -> dict[str, NodeAvailability]:
    return {report.address: report.state for report in report_nodes(table)}


def test_prefill_nodes_are_listed_first_and_unreachable_nodes_are_included() -> None:
    reports = report_nodes(a_table(up2=DECODE, away=DECODE, up1=PREFILL))

    assert [(report.address, report.state) for report in reports] == [
        ("up1", NodeAvailability.READY),
        ("away", NodeAvailability.UNREACHABLE),
        ("up2", NodeAvailability.READY),
    ]
    assert not reports[1].node_id


def test_each_reason_to_get_no_requests_is_a_separate_state() -> None:
    table = a_table(**{f"up{number}": DECODE for number in (0, 1, 2, 3, 4, 6)})
    table.note_load("up1", NodeLoad(is_draining=True))
    table.note_ready("up2", is_ready=False)
    table.note_unlisted(frozenset({"up3"}))
    table.join("up5", a_card(DECODE, "name of up4"))
    table.note_load("up6", NodeLoad(is_paused=True))

    assert states(table) == {
        "up0": NodeAvailability.READY,
        "up1": NodeAvailability.DRAINING,
        "up2": NodeAvailability.NOT_READY,
        "up3": NodeAvailability.UNLISTED,
        "up4": NodeAvailability.REPLACED,
        "up5": NodeAvailability.READY,
        "up6": NodeAvailability.PAUSED,
    }
    open_addresses = {node.address for node in table.open_nodes(DECODE)}
    assert open_addresses == {
        a for a, state in states(table).items() if state is NodeAvailability.READY
    }


def test_reported_node_status_reaches_the_caller() -> None:
    table = a_table(up=DECODE, away=PREFILL)
    table.note_load("up", NodeLoad(1, 2, 3, totals=NodeTotals(40, 10, 7)))
    [node] = table.nodes
    table.node_load(node).num_sent += 4
    order = NameOrder("sql", 2, AdapterRef("sql", "1", "a/sql"))
    adapters = NodeAdapters((order, NameOrder("chat", 3)), (LoadedAdapter("1", "a/sql", 99, 2),))
    table.note_adapters("up", adapters)

    away, up = (STATUS.from_message(STATUS.to_message(report)) for report in report_nodes(table))

    assert away == NodeStatus((PREFILL,), "away", NodeAvailability.UNREACHABLE)
    assert up == NodeStatus(
        legs=(DECODE,),
        address="up",
        state=NodeAvailability.READY,
        node_id="name of up",
        incarnation=node.card.incarnation,
        model=node.card.model,
        version=node.card.version,
        kv_transport=node.card.kv_transport,
        num_blocks=node.card.num_blocks,
        num_free_blocks=3,
        num_running=1,
        num_waiting=2,
        num_sent=4,
        totals=NodeTotals(num_prompt_tokens=40, num_hit_tokens=10, num_sampled_tokens=7),
        adapters=adapters,
        kernels="avx2",
    )
    assert up.totals.hit_rate == pytest.approx(0.25)
    assert away.totals.hit_rate is None


def test_rates_compare_two_snapshots_of_the_same_process() -> None:
    totals = NodeTotals(num_prompt_tokens=10, num_sampled_tokens=5)
    there = NodeStatus((DECODE,), "a", NodeAvailability.READY, "n", "1", totals=totals)
    other = replace(there, address="b", incarnation="2")
    before = Snapshot(10.0, (there, other))
    later = replace(there, totals=NodeTotals(num_prompt_tokens=30, num_sampled_tokens=9))
    restarted = replace(other, incarnation="3", totals=NodeTotals())

    rates = rates_between(before, Snapshot(12.0, (later, restarted)))

    assert rates == {"a": NodeRates(10.0, 2.0)}
    assert rates_between(None, before) == {}
