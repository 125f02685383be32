"""Servicers of a node: legs, KV control links and the node's state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from grpc import aio

from baton.kv_transfer.external_kv import KV
from baton.node.adapters.registry import AdapterRegistry
from baton.node.cache_resets import CacheResets, ResetPrefixCache
from baton.node.call_server import CallServer
from baton.node.kv.link import GrpcLinks
from baton.node.pauses import SetPause
from baton.node.state import NodeState
from baton.rpc.adapters import ADAPTER, ORDER
from baton.rpc.errors import UnsupportedInput
from baton.rpc.messages.calls import KIND, PAUSE_MODE
from baton.rpc.node_info import card_to, check_api_version, update_to
from baton.rpc.security.operators import NO_OPERATORS, Operators
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
