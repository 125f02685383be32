"""Reports of all known nodes, with the reason if one gets no requests. Pure."""

from __future__ import annotations

from baton.core.legs import LegKind
from baton.router.routing.node_table import NodeTable
from baton.router.routing.nodes import Node
from baton.rpc.node_info import NodeAvailability, NodeStatus


def report_nodes(table: NodeTable) -> tuple[NodeStatus, ...]:
    """Return the status of all nodes, those that offer prefill legs first, then by address."""
    joined = [_status(table, node) for node in table.nodes]
    known = {status.address for status in joined}
    away = [
        NodeStatus((kind,), address, NodeAvailability.UNREACHABLE)
        for address, kind in table.watched.items()
        if address not in known
    ]
    return tuple(sorted((*joined, *away), key=_sort_key))


def _status(table: NodeTable, node: Node) -> NodeStatus:
    card, estimate = node.card, table.node_load(node)
    load = estimate.reported
    return NodeStatus(
        legs=card.legs,
        address=node.address,
        state=_state(table, node),
        node_id=card.node_id,
        incarnation=card.incarnation,
        model=card.model,
        version=card.version,
        kv_transport=card.kv_transport,
        num_blocks=card.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_sent=estimate.num_sent,
        totals=load.totals,
        adapters=table.adapters.at(node.address).reported,
        max_loras=card.max_loras,
        kernels=card.kernels,
        num_ranks=card.num_ranks,
    )


def _state(table: NodeTable, node: Node) -> NodeAvailability:
    """Return the first state that applies."""
    load = table.node_load(node).reported
    reasons = {
        NodeAvailability.DRAINING: load.is_draining,
        NodeAvailability.NOT_READY: not table.is_ready(node),
        NodeAvailability.PAUSED: load.is_paused,
        NodeAvailability.REPLACED: not table.is_latest_of_name(node),
        NodeAvailability.UNLISTED: not table.is_listed(node),
    }
    return next((state for state, applies in reasons.items() if applies), NodeAvailability.READY)


def _sort_key(status: NodeStatus) -> tuple[bool, str]:
    return LegKind.PREFILL not in status.legs, status.address
