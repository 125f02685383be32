"""gRPC servicer of `ClusterService`, for operators: converts values to messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from grpc import aio

from baton.router.discovery.node_reports import NodeAvailability, NodeReport, report_nodes
from baton.router.prefix_resets import PrefixResets
from baton.router.routing.node_table import NodeTable
from baton.rpc.messages.mapper import enum_converter
from baton.rpc.node_info import ROLE, TOTALS
from baton.rpc.security.token_gate import sent_token
from baton.rpc.status import named_errors
from baton.rpc.streaming import streamed
from baton.v1 import cluster_pb2, cluster_pb2_grpc

MIN_INTERVAL_S = 0.1

STATE = enum_converter(NodeAvailability, cluster_pb2.NodeState.DESCRIPTOR)


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, table: NodeTable, resets: PrefixResets) -> None:
        self._table = table
        self._resets = resets

    @streamed
    async def WatchNodes(
        self, request: cluster_pb2.WatchNodesRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[cluster_pb2.WatchNodesResponse, None]:
        while True:
            reports = [report_to(report) for report in report_nodes(self._table)]
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
            resets = await self._resets.reset_all(
                tuple(request.tiers), sent_token(context.invocation_metadata())
            )
        return cluster_pb2.ResetPrefixCachesResponse(
            nodes=[cluster_pb2.NodeReset(**asdict(reset)) for reset in resets]
        )


def report_to(report: NodeReport) -> cluster_pb2.NodeReport:
    message = cluster_pb2.NodeReport(
        role=ROLE.to_message(report.role),
        address=report.address,
        state=STATE.to_message(report.state),
    )
    if report.card is None:
        return message
    card, load = report.card, report.load
    known = cluster_pb2.NodeReport(
        node_id=card.node_id,
        incarnation=card.incarnation,
        model=card.model,
        version=card.version,
        kv_transport=card.kv_transport,
        num_blocks=card.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_sent=report.num_sent,
        totals=TOTALS.to_message(load.totals),
    )
    message.MergeFrom(known)
    return message
