"""Known nodes: addresses to watch, reports, and the readiness of the router. Pure."""

from __future__ import annotations

from collections.abc import Collection

from baton.core.legs import LegKind
from baton.router.discovery.sources import NodeSource
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.rpc.node_info import NodeAvailability, NodeStatus

# Time after which a starting router serves without nodes for the other leg: from decode nodes
# alone, or texts to embed from prefill nodes alone.
PATIENCE_S = 60.0


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


class Membership:
    """Set of addresses to watch: those that a source lists or that are still reachable. Pure.

    A reachable node that is no longer listed finishes its requests and gets no new ones: service
    names drop a node that is shutting down or unhealthy long before it is gone.
    """

    def __init__(self) -> None:
        self._listed_by_source: dict[NodeSource, frozenset[str]] = {}
        self._reachable: set[str] = set()

    def set_listed(self, source: NodeSource, addresses: frozenset[str]) -> None:
        """Set the addresses of a source. A source that fails keeps its last ones."""
        self._listed_by_source[source] = addresses

    def note_joined(self, address: str) -> None:
        self._reachable.add(address)

    def note_lost(self, address: str) -> None:
        self._reachable.discard(address)

    def is_reachable(self, address: str) -> bool:
        return address in self._reachable

    @property
    def listed(self) -> frozenset[str]:
        return frozenset().union(*self._listed_by_source.values())

    @property
    def watched(self) -> frozenset[str]:
        return self.listed | self._reachable

    @property
    def unlisted(self) -> frozenset[str]:
        """Addresses that are reachable but no longer listed."""
        return frozenset(self._reachable) - self.listed


class Readiness:
    """Requires nodes for both legs of a model at start; after that, decode nodes alone suffice.

    Models that generate no text need prefill nodes only. Where several models are named, each
    needs a node at start. Prefill nodes of those that generate count once a decode node of any
    model is there: their own has had as much time to join, or there is none.
    """

    def __init__(self, *, wants_prefill: bool, now: float, models: Collection[str] = ()) -> None:
        self._has_begun = not wants_prefill
        self._missing = set(models)  # models that no node has served yet
        self._deadline_s = now + PATIENCE_S

    def is_ready(self, table: NodeTable, now: float) -> bool:
        decodes = {node.card.model for node in table.open_nodes(LegKind.DECODE)}
        prefills = [node.card for node in table.open_nodes(LegKind.PREFILL)]
        is_overdue = now >= self._deadline_s
        if decodes and (is_overdue or any(card.model in decodes for card in prefills)):
            self._has_begun = True
        encoders = [node.card for node in table.open_nodes(LegKind.ENCODE) if node.card.vector_size]
        can_embed = any(is_overdue or not card.generates for card in encoders)
        counted = [card for card in encoders if is_overdue or decodes or not card.generates]
        self._missing -= decodes | {card.model for card in counted}
        if self._missing and not is_overdue:
            return False
        return can_embed or (bool(decodes) and self._has_begun)
