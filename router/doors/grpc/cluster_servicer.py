"""gRPC servicer of `ClusterService`, for operators: converts values to messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import Any

from grpc import aio

from baton.router.orders.adapter_updates import AdapterOrder, AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.rpc.adapters import ADAPTER
from baton.rpc.messages.calls import KIND, PAUSE_MODE
from baton.rpc.node_info import STATUS, NodeStatus
from baton.rpc.security.token_gate import sent_token
from baton.rpc.status import named_errors
from baton.v1 import cluster_pb2, cluster_pb2_grpc

MIN_INTERVAL_S = 0.1


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(
        self,
        report_nodes: Callable[[], tuple[NodeStatus, ...]],
        orders: NodeOrders,
        adapters: AdapterUpdates,
    ) -> None:
        self._report_nodes = report_nodes
        self._orders = orders
        self._adapters = adapters

    async def WatchNodes(
        self, request: cluster_pb2.WatchNodesRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[cluster_pb2.WatchNodesResponse, None]:
        while True:
            reports = map(STATUS.to_message, self._report_nodes())
            yield cluster_pb2.WatchNodesResponse(nodes=reports)
            if not request.interval_s > 0:
                return
            await asyncio.sleep(max(MIN_INTERVAL_S, request.interval_s))

    async def ResetPrefixCaches(
        self,
        request: cluster_pb2.ResetPrefixCachesRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ResetPrefixCachesResponse:
        async with named_errors(context):
            resets = await self._orders.reset_prefix_caches(
                tuple(request.tiers),
                sent_token(context.invocation_metadata()),
                reset_running=request.reset_running,
            )
        return cluster_pb2.ResetPrefixCachesResponse(
            nodes=[cluster_pb2.NodeReset(**asdict(reset)) for reset in resets]
        )

    async def SetLegs(
        self,
        request: cluster_pb2.ClusterServiceSetLegsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ClusterServiceSetLegsResponse:
        async with named_errors(context):
            offered = await self._orders.set_legs(
                request.node,
                [KIND.from_message(number) for number in request.legs],
                request.drain_timeout_s,
                sent_token(context.invocation_metadata()),
            )
        return cluster_pb2.ClusterServiceSetLegsResponse(legs=map(KIND.to_message, offered))

    async def SetPause(
        self,
        request: cluster_pb2.ClusterServiceSetPauseRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ClusterServiceSetPauseResponse:
        async with named_errors(context):
            shown = sent_token(context.invocation_metadata())
            await self._orders.set_pause(request.node, PAUSE_MODE.from_message(request.mode), shown)
        return cluster_pb2.ClusterServiceSetPauseResponse()

    async def AddAdapter(
        self, request: cluster_pb2.AddAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.AddAdapterResponse:
        order = AdapterOrder(request.name, request.path, request.model, request.can_replace)
        async with named_errors(context):
            variant, num_nodes = await self._adapters.load(
                order, sent_token(context.invocation_metadata())
            )
        adapter = ADAPTER.to_message(variant.adapter)
        return cluster_pb2.AddAdapterResponse(adapter=adapter, num_nodes=num_nodes)

    async def RemoveAdapter(
        self, request: cluster_pb2.RemoveAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.RemoveAdapterResponse:
        async with named_errors(context):
            num_nodes = await self._adapters.unload(
                request.name, sent_token(context.invocation_metadata())
            )
        return cluster_pb2.RemoveAdapterResponse(num_nodes=num_nodes)
