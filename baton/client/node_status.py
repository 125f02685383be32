"""Token rates of nodes and adapters of a cluster, from reports of the router. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.core.ids import AdapterRef
from baton.rpc.adapters import NodeAdapters
from baton.rpc.node_info import NodeStatus


@dataclass(frozen=True, slots=True)
class NodeRates:
    prompt_tokens_per_s: float
    sampled_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Status of all nodes at a time of the monotonic clock."""

    at_s: float
    nodes: tuple[NodeStatus, ...]


def rates_between(before: Snapshot | None, after: Snapshot) -> dict[str, NodeRates]:
    """Return rates by address, for nodes whose process is the same in both snapshots."""
    if before is None or after.at_s <= before.at_s:
        return {}
    elapsed_s = after.at_s - before.at_s
    earlier = {(node.address, node.incarnation): node for node in before.nodes if node.incarnation}
    return {
        node.address: NodeRates(
            (node.totals.num_prompt_tokens - previous.totals.num_prompt_tokens) / elapsed_s,
            (node.totals.num_sampled_tokens - previous.totals.num_sampled_tokens) / elapsed_s,
        )
        for node in after.nodes
        if (previous := earlier.get((node.address, node.incarnation))) is not None
    }


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """An adapter on all nodes that have it."""

    adapter: AdapterRef
    model: str
    num_nodes: int = 0
    num_in_memory: int = 0  # of num_nodes; the others read it when a request needs it
    num_bytes: int = 0  # on each node that has it in memory


def adapters_of(nodes: Iterable[NodeStatus]) -> list[AdapterStatus]:
    """Return the adapters by model and name. A name has several while nodes have unlike ones.

    Those that only requests have named have an empty name.
    """
    by_model: defaultdict[str, list[NodeAdapters]] = defaultdict(list)
    for node in nodes:
        by_model[node.model].append(node.adapters)
    listed = [one for model, each in by_model.items() for one in _adapters_of_model(model, each)]
    return sorted(listed, key=lambda one: (one.model, one.adapter.name, one.adapter.id))


def _adapters_of_model(model: str, nodes: list[NodeAdapters]) -> Iterator[AdapterStatus]:
    named = [frozenset(node.named) for node in nodes]
    in_memory = [{each.id: each for each in node.in_memory} for node in nodes]
    refs = frozenset[AdapterRef]().union(*named)
    ids = {ref.id for ref in refs}
    unnamed = {each for held in in_memory for each in held.values() if each.id not in ids}
    for ref in refs | {AdapterRef("", each.id, each.path) for each in unnamed}:
        sizes = [held[ref.id].num_bytes for held in in_memory if ref.id in held]
        num_nodes = sum(
            ref in names or ref.id in held for names, held in zip(named, in_memory, strict=True)
        )
        yield AdapterStatus(ref, model, num_nodes, len(sizes), max(sizes, default=0))
