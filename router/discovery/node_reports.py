"""Reports of all known nodes, with the reason if one gets no requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.router.discovery.sources import Member
from baton.router.routing.node_table import Node, NodeTable
from baton.rpc.node_info import NodeCard, NodeLoad, NodeRole


class NodeAvailability(Enum):
    READY = "ready"
    DRAINING = "draining"
    NOT_READY = "not ready"
    UNLISTED = "unlisted"
    REPLACED = "replaced"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """State of a node. `card` is None if it is unreachable."""

    role: NodeRole
    address: str
    state: NodeAvailability
    card: NodeCard | None = None
    load: NodeLoad = NodeLoad()
    num_sent: int = 0


def report_nodes(table: NodeTable) -> tuple[NodeReport, ...]:
    """Return the reports of all nodes, prefill nodes first, then by address."""
    joined = {Member(node.card.role, node.address): node for node in table.nodes}
    members = sorted(table.watched | joined.keys(), key=_sort_key)
    return tuple(_report(table, member, joined.get(member)) for member in members)


def _report(table: NodeTable, member: Member, node: Node | None) -> NodeReport:
    if node is None:
        return NodeReport(member.role, member.address, NodeAvailability.UNREACHABLE)
    node_load = table.node_load(node)
    state = _state(table, node)
    return NodeReport(
        member.role, member.address, state, node.card, node_load.reported, node_load.num_sent
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
