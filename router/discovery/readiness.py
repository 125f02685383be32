"""Readiness of the router. Pure."""

from __future__ import annotations

from baton.router.routing.node_table import NodeTable
from baton.rpc.node_info import NodeRole

# Time after which a starting router without prefill nodes serves from decode nodes alone.
PREFILL_PATIENCE_S = 60.0


class Readiness:
    """Requires nodes of both roles of a model at start; after that, decode nodes alone suffice."""

    def __init__(self, *, wants_prefill: bool, now: float) -> None:
        self._has_begun = not wants_prefill
        self._prefill_deadline_s = now + PREFILL_PATIENCE_S

    def is_ready(self, table: NodeTable, now: float) -> bool:
        models = {node.card.model for node in table.open_nodes(NodeRole.DECODE)}
        if not models:
            return False
        has_prefill = any(node.card.model in models for node in table.open_nodes(NodeRole.PREFILL))
        if has_prefill or now >= self._prefill_deadline_s:
            self._has_begun = True
        return self._has_begun
