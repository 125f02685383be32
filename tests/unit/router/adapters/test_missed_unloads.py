"""Unloads that nodes have missed while they were away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.ids import Incarnation
from baton.router.adapters import missed_unloads
from baton.router.adapters.missed_unloads import MissedUnloads
from baton.router.routing.node_table import Node
from baton.rpc.node_info import NodeRole
from tests.support.node_calls import a_card


def a_node(process: str, model: str = "tiny") -> Node:
    card = replace(a_card(NodeRole.DECODE), incarnation=Incarnation(process), model=model)
    return Node("a:1", card)


def test_a_node_misses_the_unloads_of_what_it_had_while_it_was_away() -> None:
    missed, node, other = MissedUnloads(), a_node("one"), a_node("two", model="other")
    missed.note_unload("earlier")
    missed.note_gone(node, {"earlier", "sql", "again", "kept"})
    missed.note_gone(other, {"sql"})

    for name in ("sql", "again", "unknown"):
        missed.note_unload(name, "tiny")
    missed.note_load("again")

    assert missed.of(node) == {"sql"}
    assert missed.of(other) == missed.of(a_node("new process")) == set()
    missed.note_return(node)
    assert missed.of(node) == set()


def test_a_node_that_did_not_answer_an_unload_misses_it_when_it_joins_again() -> None:
    missed, node = MissedUnloads(), a_node("one")
    missed.note_failure(node, "sql")
    missed.note_gone(node, {"sql", "chat"})
    missed.note_unload("chat")

    assert missed.of(node) == {"sql", "chat"}


def test_the_nodes_that_have_been_away_longest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(missed_unloads, "MAX_PROCESSES", 2)
    missed, nodes = MissedUnloads(), [a_node(name) for name in ("one", "two", "three")]
    for node in nodes:
        missed.note_gone(node, {"sql"})

    missed.note_unload("sql")

    assert [missed.of(node) for node in nodes] == [set(), {"sql"}, {"sql"}]
