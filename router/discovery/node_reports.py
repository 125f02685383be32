"""Reports of all known nodes, with the reason if one gets no requests. Pure."""

from __future__ import annotations

from baton.router.discovery.sources import Member
from baton.router.routing.node_table import NodeTable
from baton.router.routing.nodes import Node
from baton.rpc.node_info import NodeAvailability, NodeRole, NodeStatus


def report_nodes(table: NodeTable) -> tuple[NodeStatus, ...]:
    """Return the status of all nodes, prefill nodes first, then by address."""
    joined = {Member(node.card.role, node.address): node for node in table.nodes}
    members = sorted(table.watched | joined.keys(), key=_sort_key)
    return tuple(_status(table, member, joined.get(member)) for member in members)


def _status(table: NodeTable, member: Member, node: Node | None) -> NodeStatus:
    if node is None:
        return NodeStatus(member.role, member.address, NodeAvailability.UNREACHABLE)
    card, estimate = node.card, table.node_load(node)
    load = estimate.reported
    return NodeStatus(
        role=member.role,
        address=member.address,
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
        adapters=table.adapters.at(member.address).reported,
        max_loras=card.max_loras,
        kernels=card.kernels,
    )


def _state(table: NodeTable, node: Node) -> NodeAvailability:
    """Return the first state that applies."""
    reasons = {
        NodeAvailability.DRAINING: table.node_load(node).reported.is_draining,
        NodeAvailability.NOT_READY: not table.is_ready(node),
        NodeAvailability.REPLACED: not table.is_latest_of_name(node),
        NodeAvailability.UNLISTED: not table.is_listed(node),
    }
    return next((state for state, applies in reasons.items() if applies), NodeAvailability.READY)


def _sort_key(member: Member) -> tuple[bool, str]:
    return member.role is not NodeRole.PREFILL, member.address
