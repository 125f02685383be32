"""Adapters of a cluster, from the status of its nodes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.ids import AdapterRef
from baton.rpc.node_info import LoadedAdapter, NodeStatus


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

    Nodes that have one only for requests do not know its name.
    """
    nodes = tuple(nodes)
    named = {
        (node.model, each.adapter.id): each.adapter
        for node in nodes
        for each in node.adapters.adapters
        if each.adapter.name
    }
    found: defaultdict[tuple[str, AdapterRef], list[LoadedAdapter]] = defaultdict(list)
    for node in nodes:
        for each in node.adapters.adapters:
            adapter = each.adapter
            if not adapter.name:
                adapter = named.get((node.model, adapter.id), adapter)
            found[node.model, adapter].append(each)
    listed = [_status(model, adapter, each) for (model, adapter), each in found.items()]
    return sorted(listed, key=lambda one: (one.model, one.adapter.name, one.adapter.id))


def _status(model: str, adapter: AdapterRef, each: list[LoadedAdapter]) -> AdapterStatus:
    return AdapterStatus(
        adapter,
        model,
        num_nodes=len(each),
        num_in_memory=sum(one.is_in_memory for one in each),
        num_bytes=max(one.num_bytes for one in each),
    )
