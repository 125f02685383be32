"""Servers that are not Baton's and compute prompts: the interface for the dispatcher."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from baton.core.foreign_kv import ForeignKv
from baton.router.dispatch.node_rpcs import NodeCalls
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.request_scope import RequestContext
from baton.router.values import GenerateCall
from baton.rpc.node_info import NodeStatus


@dataclass(frozen=True, slots=True)
class ComputedKv:
    """KV of a prompt on a server."""

    kv: ForeignKv
    server: str
    answered_s: float  # when its lease had just begun
    readers: frozenset[str]  # addresses of the decode nodes that can use it

    def aged(self, now: float) -> ForeignKv:
        return replace(self.kv, age_s=now - self.answered_s)


class ForeignPrefills(Protocol):
    """Servers of one kind, such as vLLM's. Their failures cost time, and raise nothing."""

    @property
    def has_servers(self) -> bool:
        """Return whether any server is configured."""
        ...

    async def compute_for(self, call: GenerateCall, context: RequestContext) -> ComputedKv | None:
        """Let a server compute the prompt of a call, if no prefill node of the model can."""
        ...

    def watching(
        self, profiles: ModelProfiles, node_calls: NodeCalls
    ) -> AbstractAsyncContextManager[None]:
        """Watch the servers until the end of the block."""
        ...

    def report(self) -> tuple[NodeStatus, ...]: ...
