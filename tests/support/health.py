"""Watch on the grpc.health.v1 status of a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PATIENCE_S = 60


@contextmanager
def health_of(address: str, service: str = "") -> Iterator[Iterator[str]]:
    """Yield an iterator over status changes, which raises an error if none comes in time."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=PATIENCE_S)
        try:
            yield (health_pb2.HealthCheckResponse.ServingStatus.Name(one.status) for one in watch)
        finally:
            watch.cancel()
