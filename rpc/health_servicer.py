"""Servicer of grpc.health.v1. The packaged one loses watchers when another one disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.health import LIVENESS, Health
from rpc.streaming import streamed


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service == LIVENESS:
            return _response(self._health.is_alive)
        if request.service not in self._health.services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return _response(self._health.is_ready)

    @streamed
    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        if request.service not in self._health.services:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            yield health_pb2.HealthCheckResponse(status=unknown)
            await asyncio.Event().wait()  # the protocol requires an open stream
        async for is_ready in self._health.changes():
            yield _response(is_ready)


def _response(is_well: bool) -> health_pb2.HealthCheckResponse:
    kinds = health_pb2.HealthCheckResponse
    return kinds(status=kinds.SERVING if is_well else kinds.NOT_SERVING)
