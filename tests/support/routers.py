"""Router with a real gRPC server in this process, with fake nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from grpc import aio

from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.admission.rate_limits import NO_RATE_LIMITS, RateLimitConfig
from baton.router.dispatch.retries import DispatchConfig
from baton.router.doors.grpc.servicer import InferenceServicer
from baton.router.input_processing.form_checks import FormChecks
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.pictures.plan import PictureFormat
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestScopes
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.tracing import NO_REQUEST_TRACING, Tracing
from baton.router.values import Prompt
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.server import Service, serving
from baton.rpc.status import named_errors
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.node_calls import FakeNodeCalls, a_table
from tests.support.profiles import profiles_of

UNCROWDED = AdmissionQueueConfig()


class PromptRecorder(TextBoundary):
    """Tokenization that records the prompts it reads, whose requests are queued or running."""

    def __init__(self) -> None:
        super().__init__()
        self.read: asyncio.Queue[Prompt] = asyncio.Queue()

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        token_ids = super().token_ids(prompt, max_tokens)
        self.read.put_nowait(prompt)
        return token_ids


class UnreliableRouter(InferenceServicer):
    """Router that fails its first calls, one per given fault."""

    def __init__(
        self,
        node_calls: FakeNodeCalls,
        faults: Sequence[Exception],
        table: NodeTable,
        admission_queue: AdmissionQueueConfig,
        tracing: Tracing = NO_REQUEST_TRACING,
        rate_limits: RateLimitConfig = NO_RATE_LIMITS,
        forms: FormChecks | None = None,
        text: PromptRecorder | None = None,
        images: PictureFormat | None = None,
    ) -> None:
        self.text = text or PromptRecorder()
        self.pipeline = Pipeline(
            table=table,
            node_calls=node_calls,
            profiles=profiles_of(table, self.text, images=images),
            clock=time.monotonic,
            config=PipelineConfig(
                DispatchConfig(routing=Routing(RoutingPolicy.ROUND_ROBIN)), admission_queue
            ),
            forms=forms,
        )
        super().__init__(self.pipeline, RequestScopes(tracing, rate_limits=rate_limits))
        self.faults = list(faults)
        self.num_asked = 0
        self.ended: asyncio.Queue[str] = asyncio.Queue()  # ids of released requests

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        await self._fail_first(context)
        try:
            async with aclosing(super().Generate(request, context)) as responses:
                async for response in responses:
                    yield response
        finally:
            self.ended.put_nowait(request.request_id)

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GetModelResponse:
        await self._fail_first(context)
        return await super().GetModel(request, context)

    async def _fail_first(self, context: aio.ServicerContext[Any, Any]) -> None:
        self.num_asked += 1
        async with named_errors(context):
            if self.faults:
                raise self.faults.pop(0)


@asynccontextmanager
async def a_router(
    *faults: Exception,
    node_calls: FakeNodeCalls | None = None,
    table: NodeTable | None = None,
    tls: TlsConfig = PLAIN,
    interceptors: Sequence[aio.ServerInterceptor] = (),
    admission_queue: AdmissionQueueConfig = UNCROWDED,
    port: int = 0,
    tracing: Tracing = NO_REQUEST_TRACING,
    rate_limits: RateLimitConfig = NO_RATE_LIMITS,
    forms: FormChecks | None = None,
    text: PromptRecorder | None = None,
    images: PictureFormat | None = None,
) -> AsyncIterator[tuple[UnreliableRouter, str]]:
    """Serve a router; yield it and its address."""
    nodes = node_calls or FakeNodeCalls()
    router = UnreliableRouter(
        nodes,
        faults,
        table or a_table(),
        admission_queue,
        tracing,
        rate_limits,
        forms,
        text,
        images,
    )
    service = Service(
        "baton.v1.InferenceService",
        lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server),
    )
    async with serving(
        "127.0.0.1", port, [service], tls=tls, interceptors=interceptors, for_clients=True
    ) as server:
        await server.health.set_ready(True)
        yield router, server.address
