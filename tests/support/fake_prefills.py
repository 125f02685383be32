"""vLLM servers of a router, for tests without connections."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.foreign_kv import ForeignKv
from baton.router.discovery.sources import VllmServer
from baton.router.dispatch.foreign_prefills import ComputedKv
from baton.router.dispatch.vllm.prefills import VllmPrefills
from baton.router.dispatch.vllm.servers import PrefillServers
from baton.router.routing.node_table import NodeTable
from baton.router.tracing import UNTRACED, RequestTrace


class FakePrefills(VllmPrefills):
    """vLLM servers that have computed every prompt at time 0."""

    def __init__(self, table: NodeTable, *readers: str) -> None:
        """`readers` are the addresses of nodes that can read its KV."""
        servers = PrefillServers([VllmServer("vllm", 8000)], table, lambda: 0.0)
        super().__init__(servers, lambda: 0.0)
        self.readers = frozenset(readers)
        self.num_asked = 0

    async def compute(
        self,
        model: str,
        token_ids: Sequence[int],
        timeout_s: float | None,
        trace: RequestTrace = UNTRACED,
    ) -> ComputedKv | None:
        self.num_asked += 1
        kv = ForeignKv("vllm", 5600, "engine", "cmpl-1", (7,), len(token_ids))
        return ComputedKv(kv, "vllm", answered_s=0.0, readers=self.readers)
