"""Whether the router can serve. Pure."""

from __future__ import annotations

from router.nodes import NodeTable
from serving.node import NodeRole

# A router that starts while all prefill nodes are away serves from decode nodes after so long.
PREFILL_PATIENCE_S = 60.0


class Readiness:
    """It begins as it was meant to be; after that, decode nodes can do without prefill nodes."""

    def __init__(self, *, wants_prefill: bool, now: float) -> None:
        self._has_begun = not wants_prefill
        self._begins_anyway_s = now + PREFILL_PATIENCE_S

    def is_ready(self, table: NodeTable, now: float) -> bool:
        if not table.open_nodes(NodeRole.DECODE):
            return False
        if table.open_nodes(NodeRole.PREFILL) or now >= self._begins_anyway_s:
            self._has_begun = True
        return self._has_begun
