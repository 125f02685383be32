"""Simulated nodes whose engines crash on certain requests and restart."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from baton.core.legs import LegKind
from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.router.dispatch.node_rpcs import Deliver, LegOutput
from baton.router.pipeline import Pipeline
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
from baton.router.tracing import UNTRACED, RequestTrace
from baton.rpc.errors import FailureKind, NodeFailed
from tests.support.node_calls import token_at

NUM_TICKS_DOWN = 7  # until a node that died is back


@dataclass(frozen=True, slots=True)
class Poison:
    """Request that crashes each engine that runs it."""

    leg: LegKind
    num_tokens: int = 0  # that a try gives first


@dataclass(slots=True)
class CrashingNodes:
    """Implements NodeCalls. Requests are identified by the first token of their prompt."""

    table: NodeTable
    poisons: dict[int, Poison]
    kind: FailureKind = FailureKind.ENGINE_FAILED
    num_deaths: Counter[int] = field(default_factory=Counter)  # by the request that caused them
    pipeline: Pipeline | None = None
    _num_lives: Counter[str] = field(default_factory=Counter)

    async def call(
        self,
        leg: Leg,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        serve = self.decode if leg.kind is LegKind.DECODE else self.prefill
        await serve(leg.node, request, deliver, timeout_s=timeout_s)

    async def prefill(
        self,
        node: Node,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
    ) -> None:
        life = self._begin(node)
        await self._tick(node, life, request, LegKind.PREFILL, 0)
        first = len(request.prior_output_token_ids)
        is_last = first == request.sampling.max_tokens - 1
        reason = FinishReason.LENGTH if is_last else FinishReason.HANDED_OFF
        deliver(_leg_output(LegKind.PREFILL, request, first, reason))

    async def decode(
        self,
        node: Node,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
    ) -> None:
        life = self._begin(node)
        first, last = len(request.prior_output_token_ids), request.sampling.max_tokens
        for index in range(first, last):
            if request.receive_from is None and index == first:
                await self._tick(node, life, request, LegKind.PREFILL, 0)
            await self._tick(node, life, request, LegKind.DECODE, index - first)
            reason = FinishReason.LENGTH if index == last - 1 else None
            deliver(_leg_output(LegKind.DECODE, request, index, reason))

    def _begin(self, node: Node) -> int:
        """Return the number of the node's incarnation. Raises NodeFailed while it is down."""
        if node not in self.table.nodes:
            raise NodeFailed(f"{node.address} cannot be reached")
        return self._num_lives[node.address]

    async def _tick(
        self, node: Node, life: int, request: EngineRequest, leg: LegKind, num_tokens: int
    ) -> None:
        """Run one pass of the node's engine, which can crash it. Raises NodeFailed."""
        await asyncio.sleep(0)
        name = request.prompt_token_ids[0]
        if self._num_lives[node.address] == life and self.poisons.get(name) == Poison(
            leg, num_tokens
        ):
            self.num_deaths[name] += 1
            self.end(node)
        if self._num_lives[node.address] != life:
            raise NodeFailed(f"{node.address} is gone", self.kind)

    def end(self, node: Node) -> None:
        """Crash the node's engine and all its requests."""
        self._num_lives[node.address] += 1
        self.table.lose(node.address)
        self._changed()
        loop = asyncio.get_running_loop()
        loop.call_soon(self._count_down, node, NUM_TICKS_DOWN)

    def _count_down(self, node: Node, num_ticks: int) -> None:
        if num_ticks:
            asyncio.get_running_loop().call_soon(self._count_down, node, num_ticks - 1)
            return
        self.table.join(node.address, node.card)
        self._changed()

    def _changed(self) -> None:
        if self.pipeline is not None:
            self.pipeline.handle_nodes_changed()


def _leg_output(
    leg: LegKind, request: EngineRequest, index: int, reason: FinishReason | None
) -> LegOutput:
    token_id = token_at(request, index)
    output = Output(request.request_id, index, (token_id,), finish_reason=reason)
    return LegOutput(leg, (output,))
