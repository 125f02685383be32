"""Fake of NodeCalls: answers, refuses, fails and records cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from baton.core.ids import AdapterRef, HandoffId, Incarnation, NodeId
from baton.core.legs import GENERATING, LegKind
from baton.core.output import FinishReason, Output, TokenLogprobs
from baton.core.request import PREFETCH, EngineRequest, TaskOutput
from baton.core.vectors import Floats
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.layout import KvLayout, MemoryKind
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.router.dispatch.node_rpcs import Deliver, LegEvent, LegOutput
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
from baton.router.tracing import UNTRACED, RequestTrace
from baton.rpc.adapters import LoadedAdapter, NameOrder, NodeAdapters
from baton.rpc.errors import NodeFailed
from baton.rpc.messages.calls import CallReport, handoff_id_of
from baton.rpc.node_info import NodeCard

FINGERPRINT = Fingerprint("m", KvLayout("float32", 16, 2, 2, 16, kinds=(MemoryKind((0, 1)),)))
NAMING = PrefixNaming(16, "m")
NOTHING: Mapping[str, int] = {}


def other_layout(**changes: Any) -> Fingerprint:
    """Return the fingerprint of nodes whose layout differs."""
    return replace(FINGERPRINT, layout=replace(FINGERPRINT.layout, **changes))


def a_card(role: LegKind, name: str = "", *, fingerprint: Fingerprint = FINGERPRINT) -> NodeCard:
    return NodeCard(
        node_id=NodeId(name or role.value),
        incarnation=Incarnation("1"),
        legs=(role,),
        fingerprint=fingerprint,
        model="tiny",
        max_model_len=512,
        vocab_size=100,
        num_blocks=10,
        block_bytes=1024,
        kv_transport="nixl",
        prefix_naming=NAMING,
        kernels="avx2",
    )


def a_node(role: LegKind, name: str = "", *, fingerprint: Fingerprint = FINGERPRINT) -> Node:
    card = a_card(role, name, fingerprint=fingerprint)
    return Node(f"{card.node_id}:1", card)


def a_node_of(model: str, role: LegKind, name: str = "", **fields: Any) -> Node:
    """Return a node of a model with weights of its own, unless `fingerprint` says otherwise."""
    name = name or f"{model}-{role.value}"
    fingerprint = replace(FINGERPRINT, model=model)
    naming = PrefixNaming(16, model)
    card = replace(a_card(role, name, fingerprint=fingerprint), model=model, prefix_naming=naming)
    return that_embeds(Node(f"{name}:1", replace(card, **fields)))


def that_embeds(node: Node, **fields: Any) -> Node:
    """Return the node with these fields, and the legs that follow from its vector size."""
    card = replace(node.card, **fields)
    if card.vector_size:
        legs = card.legs if card.generates else ()
        card = replace(card, legs=(*(each for each in legs if each in GENERATING), LegKind.ENCODE))
    return Node(node.address, card)


def an_embedder(model: str = "embedder", name: str = "", *, size: int = 4, **fields: Any) -> Node:
    return a_node_of(model, LegKind.ENCODE, name, generates=False, vector_size=size, **fields)


def a_table(*nodes: Node) -> NodeTable:
    table = NodeTable()
    for node in nodes or (a_node(LegKind.PREFILL), a_node(LegKind.DECODE)):
        table.join(node.address, node.card)
    return table


def reported_adapters(
    *adapters: AdapterRef,
    on_disk: Iterable[AdapterRef] = (),
    number: int = 0,
    removed: Mapping[str, int] = NOTHING,
) -> NodeAdapters:
    """Return the report of a node that has adapters in memory or on disk, by orders of a number."""
    orders = [NameOrder(each.name, number, each) for each in (*adapters, *on_disk) if each.name]
    orders += [NameOrder(*each) for each in removed.items()]
    return NodeAdapters(
        tuple(orders), tuple(LoadedAdapter(each.id, each.path, 10) for each in adapters)
    )


def token_at(request: EngineRequest, index: int) -> int:
    """Return the token that every node gives at this index."""
    return (sum(request.prompt_token_ids) + 7 * index) % 100


@dataclass(slots=True)
class ReceivedCall:
    """One recorded call to a node."""

    leg: LegKind
    node: str
    request: EngineRequest
    timeout_s: float | None = None

    @property
    def handoff_id(self) -> HandoffId:
        return handoff_id_of(self.request.request_id)


@dataclass(slots=True)
class FakeNodeCalls:
    """Fake of NodeCalls. Each fault hits one call, the first that matches."""

    prefill_faults: list[Exception] = field(default_factory=list)
    breaks_when_decoded: bool = False  # prefill fails after its token and all of decode's
    decode_breaks_after: list[int] = field(default_factory=list)  # so many tokens
    prompt_faults: list[Exception] = field(default_factory=list)  # between chunks of a prompt
    is_prompt_late: bool = False  # its logprobs arrive after all of decode's tokens
    is_endless: bool = False  # decode never finishes
    ends_by: FinishReason = FinishReason.LENGTH
    is_prefill_late: bool = False  # its token arrives after all of decode's
    stop_token_id: int | None = None  # that ends decode, as `ends_by` says
    num_cached_on_prefill: int | None = 0  # prompt tokens in its prefix cache; None: not reported
    loaded_on_prefill: Mapping[str, int] = field(default_factory=dict)  # of these, by tier
    report: CallReport = CallReport(kv_bytes=2048, kv_blocks=2, kv_transport="nixl")
    may_prefill_report: asyncio.Event | None = None  # prefill's only output waits for it
    decode_told_all: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[ReceivedCall] = field(default_factory=list)
    left: list[LegKind] = field(default_factory=list)  # calls cancelled before their end

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
        kind = LegKind.ENCODE if request.task.is_pooling else LegKind.PREFILL
        self.received.append(ReceivedCall(kind, node.card.node_id, request, timeout_s))
        if self.prefill_faults:
            raise self.prefill_faults.pop(0)
        if request.task.is_pooling:
            deliver(LegOutput(LegKind.ENCODE, (_pooled(request),)))
            return
        if self.is_prefill_late:
            await self.decode_told_all.wait()
        if self.may_prefill_report is not None:
            await self.may_prefill_report.wait()
        if request.sampling.prompt_logprobs is not None:
            await self._tell_prompt(request, deliver)
        first = len(request.prior_output_token_ids)
        token_id = token_at(request, first)
        output = _output(request, first, token_id, FinishReason.HANDED_OFF)
        num_cached = self.num_cached_on_prefill
        loaded = self.loaded_on_prefill
        report = (
            None
            if num_cached is None
            else CallReport(prompt_tokens_cached=num_cached, prompt_tokens_loaded=loaded)
        )
        if request.task is PREFETCH:
            output = Output(request.request_id, first, finish_reason=FinishReason.LENGTH)
        deliver(LegOutput(LegKind.PREFILL, (output,), report))
        if self.breaks_when_decoded:
            await self.decode_told_all.wait()
            raise NodeFailed("the prefill node went away")

    async def _tell_prompt(self, request: EngineRequest, deliver: Deliver) -> None:
        if self.is_prompt_late:
            await self.decode_told_all.wait()
        for place, entry in enumerate(prompt_logprobs_of(request)):
            if place > 0 and self.prompt_faults:
                raise self.prompt_faults.pop(0)
            deliver(LegOutput(LegKind.PREFILL, (_of_prompt(request, place, entry),)))

    async def decode(
        self,
        node: Node,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.received.append(ReceivedCall(LegKind.DECODE, node.card.node_id, request, timeout_s))
        breaks_after = self.decode_breaks_after.pop(0) if self.decode_breaks_after else None
        try:
            for event in self._decoded(request, breaks_after):
                deliver(event)
            self.decode_told_all.set()
            if self.is_endless:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.append(LegKind.DECODE)
            raise

    def _decoded(self, request: EngineRequest, breaks_after: int | None) -> Iterator[LegEvent]:
        first, last = len(request.prior_output_token_ids), request.sampling.max_tokens
        first += self.is_prefill_late
        if request.receive_from is None and request.sampling.prompt_logprobs is not None:
            for place, entry in enumerate(prompt_logprobs_of(request)):
                yield LegOutput(LegKind.DECODE, (_of_prompt(request, place, entry),))
        for count, index in enumerate(range(first, last)):
            if count == breaks_after:
                raise NodeFailed("the decode node went away")
            is_last = index == last - 1 and not self.is_endless
            reason = self.ends_by if is_last else None
            output = _output(request, index, token_at(request, index), reason)
            if is_last:
                output = output._replace(stop_token_id=self.stop_token_id)
            yield LegOutput(LegKind.DECODE, (output,), self.report if count == 0 else None)


def vector_of(token_ids: Sequence[int]) -> Floats:
    """Return the vector that every node gives."""
    numbers = np.array([1, len(token_ids), sum(token_ids) % 10, token_ids[0] % 10], np.float32)
    return numbers / np.linalg.norm(numbers)


def _pooled(request: EngineRequest) -> Output:
    vector = vector_of(request.prompt_token_ids).astype("<f4").tobytes()
    if request.task.output is TaskOutput.VECTORS:
        vectors = [vector_of([token_id]).astype("<f4") for token_id in request.prompt_token_ids]
        vector = np.stack(vectors).tobytes()
    return Output(request.request_id, 0, finish_reason=FinishReason.STOP, vector=vector)


def prompt_logprobs_of(request: EngineRequest) -> list[TokenLogprobs | None]:
    """Return the prompt logprobs that every node gives, one token per chunk."""
    known = request.prompt_token_ids[1:]
    return [None, *(TokenLogprobs(token, -float(token), rank=1) for token in known)]


def _of_prompt(request: EngineRequest, place: int, entry: TokenLogprobs | None) -> Output:
    return Output(request.request_id, 0, prompt_logprobs=(entry,), first_prompt_index=place)


def _output(
    request: EngineRequest, index: int, token_id: int, reason: FinishReason | None
) -> Output:
    return Output(request.request_id, index, (token_id,), finish_reason=reason)
