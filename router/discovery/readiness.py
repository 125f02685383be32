"""Readiness of the router. Pure."""

from __future__ import annotations

from collections.abc import Collection

from baton.router.routing.node_table import NodeTable
from baton.rpc.node_info import NodeRole

# Time after which a starting router serves without nodes of the other role: from decode nodes
# alone, or texts to embed from prefill nodes alone.
PATIENCE_S = 60.0


class Readiness:
    """Requires nodes of both roles of a model at start; after that, decode nodes alone suffice.

    Models that generate no text need prefill nodes only. Where several models are named, each
    needs a node at start.
    """

    def __init__(self, *, wants_prefill: bool, now: float, models: Collection[str] = ()) -> None:
        self._has_begun = not wants_prefill
        self._missing = set(models)  # models that no node has served yet
        self._deadline_s = now + PATIENCE_S

    def is_ready(self, table: NodeTable, now: float) -> bool:
        decodes = {node.card.model for node in table.open_nodes(NodeRole.DECODE)}
        prefills = [node.card for node in table.open_nodes(NodeRole.PREFILL)]
        is_overdue = now >= self._deadline_s
        if decodes and (is_overdue or any(card.model in decodes for card in prefills)):
            self._has_begun = True
        can_embed = any(
            card.vector_size and (is_overdue or not card.generates) for card in prefills
        )
        self._missing -= decodes | {card.model for card in prefills if card.vector_size}
        if self._missing and not is_overdue:
            return False
        return can_embed or (bool(decodes) and self._has_begun)
