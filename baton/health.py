"""Asks one server of a cluster whether it can serve, as probes do: quick to start, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True, slots=True)
class Verdict:
    is_serving: bool
    words: str  # for whoever reads the probe's output


def ask(channel: grpc.Channel, address: str, timeout_s: float) -> Verdict:
    """One `grpc.health.v1` check of the whole process."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        return Verdict(False, f"{address} did not answer: {error.code().name}: {error.details()}")
    if answer.status != Status.SERVING:
        told = Status.ServingStatus.Name(answer.status)
        return Verdict(False, f"{address} is not ready: {told}")
    return Verdict(True, f"{address} is serving")
