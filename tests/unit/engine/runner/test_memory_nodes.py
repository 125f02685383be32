"""Memory nodes of machines, as folders like those of Linux, and the CPUs of ranks on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.runner.ranks.leading import cpus_by_rank

TWO = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}
FIRST, SECOND = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})
ALL = FIRST | SECOND


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return tmp_path


def with_nodes(machine: Path, cpulists: dict[int, str]) -> Path:
    for number, cpulist in cpulists.items():
        (machine / f"node{number}").mkdir()
        (machine / f"node{number}" / "cpulist").write_text(cpulist, encoding="ascii")
    (machine / "online").write_text("0-1", encoding="ascii")
    return machine


def test_each_rank_has_a_memory_node(machine: Path) -> None:
    assert cpus_by_rank(2, ALL, with_nodes(machine, TWO)) == [FIRST, SECOND]


def test_ranks_share_a_node_if_there_are_more_of_them(machine: Path) -> None:
    assert cpus_by_rank(4, ALL, with_nodes(machine, TWO)) == [FIRST, FIRST, SECOND, SECOND]


def test_nodes_are_divided_among_fewer_ranks(machine: Path) -> None:
    nodes = with_nodes(machine, {10: "5", 2: "2", 0: "0", 1: "1"})

    assert cpus_by_rank(2, ALL, nodes) == [frozenset({0, 1}), frozenset({2, 5})]


def test_only_cpus_that_the_process_may_use_count(machine: Path) -> None:
    nodes = with_nodes(machine, TWO)

    assert cpus_by_rank(2, {0, 1, 4, 5}, nodes) == [frozenset({0, 1}), frozenset({4, 5})]
    assert cpus_by_rank(2, {0, 1}, nodes) == [None, None]  # all of one node


def test_nothing_is_bound_on_a_machine_of_one_node_or_of_unknown_ones(machine: Path) -> None:
    assert cpus_by_rank(2, ALL, machine / "missing") == [None, None]
    # The other one has memory alone.
    assert cpus_by_rank(2, ALL, with_nodes(machine, {0: "0-15", 1: "\n"})) == [None, None]
