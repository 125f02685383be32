"""Readiness of the router. Pure."""

from __future__ import annotations

from collections.abc import Collection

from baton.core.legs import LegKind
from baton.router.routing.node_table import NodeTable

# Time after which a starting router serves without nodes for the other leg: from decode nodes
# alone, or texts to embed from prefill nodes alone.
PATIENCE_S = 60.0


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
