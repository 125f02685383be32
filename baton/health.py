"""Asks one server of a cluster whether it can serve, as probes do: quick to start, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.channel import open_blocking_channel
from serving.router_address import MET_HTTP_1, router_target, unreachable
from serving.tls import TlsConfig
from serving.tls_trouble import tls_trouble

Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True, slots=True)
class Verdict:
    is_serving: bool
    words: str  # for whoever reads the probe's output


def ask(address: str, timeout_s: float, tls: TlsConfig, service: str = "") -> Verdict:
    """One `grpc.health.v1` check of the whole process, or of one of its services.

    Raises InvalidConfig for an address that cannot be.
    """
    address = router_target(address)
    with open_blocking_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return Verdict(False, _why_not(address, timeout_s, tls, error))
    if answer.status != Status.SERVING:
        told = Status.ServingStatus.Name(answer.status)
        return Verdict(False, f"{address} is not {'alive' if service else 'ready'}: {told}")
    return Verdict(True, f"{address} is serving")


def _why_not(address: str, timeout_s: float, tls: TlsConfig, error: grpc.RpcError) -> str:
    code, details = error.code(), error.details() or ""
    trouble = tls_trouble(address, tls, timeout_s)
    if trouble is None and MET_HTTP_1 in details:
        return unreachable(address, details)
    return f"{address} did not answer: {code.name}: {trouble or details}"
