"""SMG's gRPC service of a router with fake nodes, called with the stubs of smg-grpc-proto."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from baton.router.doors.smg.service import smg_services
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestScopes
from baton.router.routing.node_table import NodeTable
from baton.rpc.channel import open_channel
from baton.rpc.server import serving
from tests.support.node_calls import FakeNodeCalls, a_table
from tests.support.profiles import profiles_of


@dataclass(frozen=True)
class SmgRouter:
    stub: Any
    pipeline: Pipeline
    nodes: FakeNodeCalls

    async def generate(self, prompt: Sequence[int], **fields: Any) -> list[Any]:
        """Return all responses to a prompt."""
        return [response async for response in self.stub.Generate(a_request(prompt, **fields))]


@asynccontextmanager
async def an_smg_router(
    nodes: FakeNodeCalls | None = None,
    *,
    table: NodeTable | None = None,
    model: str = "",
    interceptors: Sequence[aio.ServerInterceptor] = (),
) -> AsyncIterator[SmgRouter]:
    nodes, table = nodes or FakeNodeCalls(), table or a_table()
    pipeline = Pipeline(
        table=table,
        node_calls=nodes,
        profiles=profiles_of(table),
        clock=time.monotonic,
        config=PipelineConfig(),
    )
    orders = NodeOrders(table, open_channel)
    services = smg_services(pipeline, RequestScopes(), orders, model, is_on=True)
    async with (
        serving("127.0.0.1", 0, services, interceptors=interceptors, for_clients=True) as server,
        open_channel(server.address) as channel,
    ):
        yield SmgRouter(vllm_engine_pb2_grpc.VllmEngineStub(channel), pipeline, nodes)


def a_request(
    prompt: Sequence[int], *, request_id: str = "a", is_streamed: bool = False, **sampling: Any
) -> Any:
    """Return a request with these fields of its sampling parameters."""
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt),
        sampling_params=vllm_engine_pb2.SamplingParams(**sampling),
        stream=is_streamed,
    )
