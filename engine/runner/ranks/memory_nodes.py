"""Memory nodes (NUMA) of the machine, and which of them each rank runs on. Pure but for reads."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from baton.engine.runner.model.rank_group import Shard

NODES = Path("/sys/devices/system/node")

Cpus = frozenset[int]


def cpus_by_rank(
    num_ranks: int, allowed: AbstractSet[int], nodes: Path = NODES
) -> Sequence[Cpus | None]:
    """Return the CPUs of each rank among those allowed; None: it can use all of them.

    Ranks are divided among memory nodes, or the nodes among ranks if there are more of them. Memory
    is on the node of the CPU that first touches it.
    """
    local = [cpus & allowed for cpus in _cpus_by_node(nodes)]
    usable = [cpus for cpus in local if cpus]  # some nodes have memory alone
    if len(usable) < 2:
        return [None] * num_ranks
    return [
        frozenset().union(*(usable[node] for node in Shard(rank, num_ranks).part_of(len(usable))))
        for rank in range(num_ranks)
    ]


def _cpus_by_node(nodes: Path) -> list[Cpus]:
    found = sorted(nodes.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    return [_cpus((node / "cpulist").read_text(encoding="ascii")) for node in found]


def _cpus(written: str) -> Cpus:
    """Return the CPUs of a list such as 0-3,8."""
    ranges = (part.split("-") for part in written.strip().split(",") if part)
    return frozenset(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1))
