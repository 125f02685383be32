"""Which nodes serve a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.policy import Ask, RoundRobin, choose
from serving.errors import NoNodes
from serving.node import NodeLoad, NodeRole
from tests.support.node_calls import FINGERPRINT, a_node, a_table

ASK = Ask((1, 2, 3))


def test_nodes_of_a_role_take_turns() -> None:
    table = a_table(
        *(a_node(NodeRole.PREFILL, f"p{n}") for n in range(2)),
        *(a_node(NodeRole.DECODE, f"d{n}") for n in range(3)),
    )
    policy = RoundRobin()

    routes = [choose(table, policy, ASK) for _ in range(6)]

    assert [route.decode.card.node_id for route in routes] == ["d0", "d1", "d2"] * 2
    assert [route.prefill and route.prefill.card.node_id for route in routes] == ["p0", "p1"] * 3


def test_only_nodes_whose_kv_means_the_same_are_paired() -> None:
    other = replace(FINGERPRINT, block_size=32)
    table = a_table(
        a_node(NodeRole.PREFILL, "p-other", fingerprint=other),
        a_node(NodeRole.PREFILL, "p-same"),
        a_node(NodeRole.DECODE),
    )
    policy = RoundRobin()

    chosen = {choose(table, policy, ASK).prefill for _ in range(3)}

    assert chosen == {a_node(NodeRole.PREFILL, "p-same")}


def test_without_a_fitting_prefill_node_decode_prefills_and_the_reason_is_told() -> None:
    other = a_node(NodeRole.PREFILL, fingerprint=replace(FINGERPRINT, model="else"))

    route = choose(a_table(other, a_node(NodeRole.DECODE)), RoundRobin(), ASK)

    assert route.prefill is None
    assert "fits" in route.local_reason


def test_draining_failed_and_lost_nodes_are_passed_over() -> None:
    draining, failed, lost, left = (a_node(NodeRole.DECODE, f"d{n}") for n in range(4))
    table = a_table(draining, failed, lost, left)
    table.note_load(draining.address, NodeLoad(is_draining=True))
    table.lose(lost.address)

    route = choose(table, RoundRobin(), ASK, without=frozenset({failed.address}))

    assert route.decode == left


def test_no_decode_node_is_a_named_refusal() -> None:
    with pytest.raises(NoNodes):
        choose(a_table(a_node(NodeRole.PREFILL)), RoundRobin(), ASK)
