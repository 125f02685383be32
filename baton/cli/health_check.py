"""Health check of one server of a cluster, for probes: starts fast, does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.channel import open_blocking_channel
from baton.rpc.router_address import (
    HTTP1_ERROR_FRAGMENT,
    connection_error,
    router_target,
    unreachable,
)
from baton.rpc.security.tls import TlsConfig, connection_trouble

Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    is_serving: bool
    words: str


def ask(address: str, timeout_s: float, tls: TlsConfig, service: str = "") -> HealthVerdict:
    """Run one `grpc.health.v1` check of the process, or of one of its services.

    Raises InvalidConfig for a malformed address.
    """
    address = router_target(address)
    with open_blocking_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return HealthVerdict(False, _failure_message(address, tls, error))
    if response.status != Status.SERVING:
        status = Status.ServingStatus.Name(response.status)
        return HealthVerdict(False, f"{address} is not {'alive' if service else 'ready'}: {status}")
    return HealthVerdict(True, f"{address} is serving")


def _failure_message(address: str, tls: TlsConfig, error: grpc.RpcError) -> str:
    code, details = error.code(), error.details() or ""
    if HTTP1_ERROR_FRAGMENT in details:
        return unreachable(address, details)
    trouble = connection_trouble(address, tls, details)
    return f"{address} did not answer: {code.name}: {trouble or connection_error(details)}"
