"""Servicers of a node: legs and their accounting, KV control links, the node's state."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from grpc import aio

from baton.core.ids import HandoffId, RequestId
from baton.core.legs import LegKind
from baton.core.output import Output
from baton.core.request import EngineRequest, TaskOutput
from baton.engine.plan import Plan, PlanRow, StepObserver, StepRecord
from baton.kv_transfer.external_kv import KV
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.types import NO_REPORTS
from baton.node.adapters.registry import AdapterRegistry
from baton.node.call_streams import CallContext, serve_calls
from baton.node.kv.link import GrpcLinks
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.operator_orders import CacheResets, ResetPrefixCache, SetPause
from baton.node.state import NodeState
from baton.prefill_node.leg import PrefillLegs
from baton.rpc.adapters import ADAPTER, ORDER
from baton.rpc.errors import UnsupportedInput
from baton.rpc.messages.calls import KIND, PAUSE_MODE, CallReport, engine_request, event_to
from baton.rpc.node_info import card_to, check_api_version, update_to
from baton.rpc.security.token import NO_OPERATORS, Operators
from baton.rpc.security.token_gate import sent_token
from baton.rpc.status import named_errors
from baton.v1 import kv_link_pb2, kv_link_pb2_grpc, node_pb2, node_pb2_grpc


class KvLinkServicer(kv_link_pb2_grpc.KvLinkServiceServicer):
    """Accepts control links from nodes that receive KV from this one."""

    def __init__(self, links: GrpcLinks) -> None:
        self._links = links

    async def Link(
        self,
        request_iterator: AsyncIterator[kv_link_pb2.LinkRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[kv_link_pb2.LinkResponse, None]:
        async with (
            named_errors(context),
            aclosing(self._links.accept(request_iterator)) as responses,
        ):
            async for response in responses:
                yield response


class LegServicer(node_pb2_grpc.LegServiceServicer):
    def __init__(
        self, calls: CallServer, state: NodeState, connect: Callable[[str], Awaitable[None]]
    ) -> None:
        self._calls = calls
        self._state = state
        self._connect = connect

    def Serve(
        self,
        request_iterator: AsyncIterator[node_pb2.ServeRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.ServeResponse, None]:
        return self._calls.serve(request_iterator, context)

    async def Connect(
        self, request: node_pb2.ConnectRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ConnectResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            with self._state.count_call():
                await self._connect(request.prefill.address)
        return node_pb2.ConnectResponse()


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Reports the node's card and load. Operators change what it serves, and drain it."""

    def __init__(
        self,
        state: NodeState,
        reset_prefix_cache: ResetPrefixCache,
        set_pause: SetPause,
        operators: Operators = NO_OPERATORS,
        shared_tiers: frozenset[str] = frozenset(),  # of this node, which others use, too
    ) -> None:
        self._state = state
        self._resets = CacheResets(state, reset_prefix_cache, operators, shared_tiers)
        self._set_pause = set_pause
        self._operators = operators

    async def GetNode(
        self, request: node_pb2.GetNodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.GetNodeResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            check_api_version(request)
        return card_to(self._state.card)

    async def Watch(
        self, request: node_pb2.WatchRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[node_pb2.WatchResponse, None]:
        async with aclosing(self._state.watch_updates()) as updates:
            async for update in updates:
                yield update_to(*update)

    async def Drain(
        self, request: node_pb2.DrainRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.DrainResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            self._operators.check(sent_token(context.invocation_metadata()))
        self._state.request_drain()
        return node_pb2.DrainResponse(num_unfinished=self._state.num_calls)

    async def SetLegs(
        self, request: node_pb2.SetLegsRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.SetLegsResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            self._operators.check(sent_token(context.invocation_metadata()))
            kinds = [KIND.from_message(number) for number in request.legs]
            offered = await self._state.legs.change(kinds, request.drain_timeout_s)
        return node_pb2.SetLegsResponse(legs=map(KIND.to_message, offered))

    async def SetPause(
        self, request: node_pb2.SetPauseRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.SetPauseResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            self._operators.check(sent_token(context.invocation_metadata()))
            mode = PAUSE_MODE.from_message(request.mode)
            if mode is not None:  # before the scheduler: no request comes in between
                self._state.note_pause(is_paused=True)
            await self._set_pause(mode)
            if mode is None:
                self._state.note_pause(is_paused=False)
        return node_pb2.SetPauseResponse()

    async def ResetPrefixCache(
        self, request: node_pb2.ResetPrefixCacheRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ResetPrefixCacheResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            shown = sent_token(context.invocation_metadata())
            num_blocks = await self._resets.reset(
                tuple(request.tiers), shown, reset_running=request.reset_running
            )
        return node_pb2.ResetPrefixCacheResponse(
            num_blocks=num_blocks.get(KV, 0), num_blocks_by_tier=num_blocks
        )

    async def ReadAdapter(
        self, request: node_pb2.ReadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ReadAdapterResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            adapters = self._adapters_for(context)
            with self._state.count_call():
                adapter = await adapters.read(request.path, request.name)
        return node_pb2.ReadAdapterResponse(adapter=ADAPTER.to_message(adapter))

    async def SetAdapterNames(
        self, request: node_pb2.SetAdapterNamesRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.SetAdapterNamesResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            orders = [ORDER.from_message(each) for each in request.names]
            self._adapters_for(context).set_names(orders)
        return node_pb2.SetAdapterNamesResponse()

    def _adapters_for(self, context: aio.ServicerContext[Any, Any]) -> AdapterRegistry:
        """Raises NotAnOperator, also without operators: adapters change answers of all clients."""
        strict = replace(self._operators, is_open=False)
        strict.check(sent_token(context.invocation_metadata()))
        if self._state.adapters is None:
            raise UnsupportedInput(
                "this node serves no adapters: start it with --lora-root, or --lora NAME=FOLDER"
            )
        return self._state.adapters


@dataclass(frozen=True, slots=True, eq=False)
class CallServer:
    """Serves legs. Each is counted by the ledger until its end.

    Those that send KV end after the last write, and report only with their last output.
    """

    state: NodeState
    ledger: RequestLedger
    prefills: PrefillLegs
    tracing: NodeTracing = NO_TRACING

    async def serve(
        self, requests: AsyncIterator[node_pb2.ServeRequest], context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[node_pb2.ServeResponse, None]:
        node_id = self.state.card.node_id
        calls = serve_calls(
            requests,
            self._serve_call,
            self.state.serving_leg,
            self.state.wait_until_drained,
            node_id=node_id,
        )
        async with named_errors(context, node_id=node_id), aclosing(calls):
            async for events in calls:
                yield node_pb2.ServeResponse(events=events)

    async def _serve_call(
        self, kind: LegKind, order: node_pb2.LegOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        """Yield an event for each output, some with a report, and end after the last KV write.

        Closing the generator early aborts the request.
        """
        request = engine_request(order, time.monotonic())
        is_first, reason = True, None
        with (
            self.tracing.record_call(context, kind, request) as timeline,
            self.ledger.open_entry(request.request_id) as entry,
            self.prefills.sending(request.send_to),
        ):
            async with (
                self._holding_adapter(request),
                aclosing(self.state.calls.stream_outputs(request)) as outputs,
            ):
                async for output in outputs:
                    report, reason = None, output.finish_reason
                    # Not for the outputs in between, whose number is that of the tokens.
                    if is_first or reason is not None:
                        report = self._report(request, entry, output)
                        if timeline is not None:
                            timeline.note_output(output)
                    yield event_to(output, report)
                    is_first = False
            if request.send_to is not None:
                await self.prefills.until_sent(request.send_to, reason)

    def _holding_adapter(self, request: EngineRequest) -> AbstractAsyncContextManager[None]:
        adapters = self.state.adapters
        return nullcontext() if adapters is None else adapters.held(request.adapter)

    def _report(self, request: EngineRequest, entry: Entry, output: Output) -> CallReport | None:
        """Return the report that goes with the first or the last output."""
        served = output.served
        if request.send_to is not None and served is None:
            return None
        num_cached = entry.num_cached_prompt_tokens
        if request.task.output is TaskOutput.KV and served is not None:
            num_cached = served.num_cached_tokens  # it never runs, so the ledger has no count
        return CallReport(
            kv_bytes=entry.num_received_bytes,
            kv_blocks=entry.num_received_blocks,
            kv_transport=self.state.card.kv_transport if entry.num_received_blocks else "",
            prompt_tokens_computed=entry.num_computed_prompt_tokens,
            prompt_tokens_cached=num_cached,
            tokens_proposed=0 if served is None else served.num_proposed_tokens,
            tokens_accepted=0 if served is None else served.num_accepted_tokens,
            kv_conversion=entry.kv_conversion,
            prompt_tokens_loaded={} if served is None else served.loaded_tokens,
        )


@dataclass(slots=True)
class Entry:
    """Counters of one request on this node, including recomputation after preemptions."""

    num_computed_prompt_tokens: int = 0  # by this node's model
    num_cached_prompt_tokens: int = 0  # prefix-cache hits at the first run
    num_received_blocks: int = 0  # KV blocks written by a peer
    num_received_bytes: int = 0
    kv_conversion: str = ""  # of the received blocks


class RequestLedger(StepObserver):
    """Accounting entries of the requests in flight.

    Entries are written on the engine's thread. An entry is up to date for each output that has
    been delivered. The id of a hand-off is the id of its request on this node, such as `a#1`.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called on the engine's thread when blocks are granted or freed."""
        self._entries: dict[RequestId, Entry] = {}
        self._on_change = on_change
        # Called there for each hand-off whose last write has completed; must not block.
        self.on_sent: Callable[[HandoffId], None] = lambda _: None

    @contextmanager
    def open_entry(self, request_id: RequestId) -> Iterator[Entry]:
        """Count for a request until the block ends."""
        entry = self._entries[request_id] = Entry()
        try:
            yield entry
        finally:
            del self._entries[request_id]

    def note_plan(self, plan: Plan, now_s: float) -> None:
        receives = plan.kv_orders.receives
        if receives or plan.started or plan.dropped:
            self._on_change()
        for receive in receives:
            entry = self._entries.get(RequestId(str(receive.handoff_id)))
            if entry is not None:
                entry.num_cached_prompt_tokens = receive.num_cached_tokens
        for row in plan.started:
            self._note_started(row)

    def note_end(self, step: StepRecord) -> None:
        for record in step.transfers:
            self._note_record(record)
        if step.reports != NO_REPORTS:
            self._on_change()
        for handoff_id in step.reports.finished_sending:
            self.on_sent(handoff_id)

    def _note_started(self, row: PlanRow) -> None:
        entry = self._entries.get(row.request_id)
        if entry is None:
            return
        num_known = min(row.num_prompt_tokens, row.num_computed_tokens)
        if entry.num_computed_prompt_tokens == 0 and entry.num_received_blocks == 0:
            entry.num_cached_prompt_tokens = num_known
        entry.num_computed_prompt_tokens += row.num_prompt_tokens - num_known

    def _note_record(self, record: TransferRecord) -> None:
        entry = self._entries.get(RequestId(str(record.handoff_id)))
        if entry is not None and record.role is TransferRole.RECEIVED and record.outcome == "done":
            entry.num_received_blocks += record.num_blocks
            entry.num_received_bytes += record.num_bytes
            entry.kv_conversion = record.conversion
