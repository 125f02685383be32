"""Readiness and liveness of this process, and the servicer of grpc.health.v1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

HEALTH = "grpc.health.v1.Health"
# Service name of liveness probes, which restart the process when they fail. Readiness does not
# qualify for that: it is false while the process drains or while a router has no nodes.
LIVENESS = "live"


class Health:
    """Readiness of the whole process, reported for each of its services."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self.services = frozenset({"", *services})
        self.is_alive = True  # False: only a restart can help
        self._is_ready = False
        self._changed = asyncio.Condition()

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    async def set_ready(self, is_ready: bool) -> None:
        async with self._changed:
            if is_ready != self._is_ready:
                self._is_ready = is_ready
                self._changed.notify_all()

    async def changes(self) -> AsyncGenerator[bool, None]:
        """Yield the current readiness, then each change."""
        is_ready = self._is_ready
        while True:
            yield is_ready
            async with self._changed:
                while is_ready is self._is_ready:
                    await self._changed.wait()
                is_ready = self._is_ready


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of a process. The packaged servicer loses watchers when another one disconnects."""

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
