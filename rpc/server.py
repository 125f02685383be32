"""gRPC server lifecycle: bind, serve with health and reflection, drain, close."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from baton.rpc.accepting import shut_port
from baton.rpc.channel import (
    CONNECTIONS,
    KEEPALIVE,
    Keepalive,
    ServerConnections,
    server_options,
)
from baton.rpc.errors import AddressInUse
from baton.rpc.health import HEALTH, Health, HealthServicer
from baton.rpc.listening import check_port
from baton.rpc.messages.interceptor import MessageInterceptor
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from baton.rpc.security.certificates import grpc_credentials
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.token_gate import Continuation, Handler

READY_PREFIX = "baton ready:"
# Time limit of calls that outlive the drain. Watches, which do not end, are cancelled after it.
CLOSE_GRACE_S = 0.2
V1, V1_FILE = "grpc.reflection.v1", "grpc/reflection/v1/reflection.proto"
V1ALPHA = "grpc.reflection.v1alpha"
V1_SERVICE = f"{V1}.ServerReflection"
# Error details. No service's file imports this one, so it must be added to the pool explicitly.
ERROR_DETAILS_FILE = error_details_pb2.DESCRIPTOR.name


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer and its full name, as reported by reflection."""

    name: str
    add_to: Callable[[aio.Server], None]


@dataclass(frozen=True, slots=True)
class Running:
    address: str  # host:port with the port that was bound
    health: Health


@asynccontextmanager
async def serving(
    host: str,
    port: int,
    services: Sequence[Service],
    *,
    tls: TlsConfig = PLAIN,
    keepalive: Keepalive = KEEPALIVE,
    connections: ServerConnections = CONNECTIONS,
    interceptors: Sequence[aio.ServerInterceptor] = (),
    for_clients: bool = False,
) -> AsyncIterator[Running]:
    """Serve until the block ends. Health starts as not ready.

    With `for_clients`, requests are limited to MAX_REQUEST_BYTES; otherwise to MAX_MESSAGE_BYTES,
    as between processes of one cluster.
    """
    names = tuple(service.name for service in services)
    health = Health(names)
    max_request_bytes = MAX_REQUEST_BYTES if for_clients else MAX_MESSAGE_BYTES
    running, messages = _RunningCalls(), MessageInterceptor(is_gauged=for_clients)
    server = aio.server(
        interceptors=(running, *interceptors, messages),
        options=server_options(keepalive, connections, max_request_bytes),
    )
    for service in services:
        service.add_to(server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(health), server)
    enable_reflection((*names, HEALTH), server)
    bound_port = _bind(server, host, port, tls)
    await server.start()
    try:
        yield Running(f"{host}:{bound_port}", health)
    finally:
        await _close(server, bound_port, running.tasks)


class _RunningCalls(aio.ServerInterceptor):
    """Keeps the tasks of calls from their first turn of the event loop to their last one."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        task = asyncio.current_task()
        if task is not None:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return await continuation(handler_call_details)


async def _close(server: aio.Server, port: int, calls: set[asyncio.Task[Any]]) -> None:
    """Close a drained server, and return when its calls have ended.

    gRPC ends calls that arrive while it shuts down as CANCELLED, which clients do not retry:
    without connections, none arrive, and clients report UNAVAILABLE. It logs calls that the end of
    the event loop cancels as errors.
    """
    if calls:
        await asyncio.wait(calls, timeout=CLOSE_GRACE_S)
    shut_port(port)
    await server.stop(None)
    await asyncio.sleep(0)  # calls that arrived last begin, each in a task of its own
    while calls:
        await asyncio.wait(calls)


def announce(role: str, address: str) -> None:
    """Print the line from which a parent process reads the port.

    One write, since print() writes the end of the line separately if the output is unbuffered: a
    log line of another thread could get in between.
    """
    sys.stdout.write(f"{READY_PREFIX} {role} {address}\n")
    sys.stdout.flush()


def freeze_heap() -> None:
    """Exempt all objects so far from garbage collection, in a process that serves to its end.

    A full collection looks at all objects, most of them of imports, and stops all threads for that
    time: 60,000 objects and 32 ms in a router, 250,000 and 138 ms in a node (one thread of Zen 5).
    """
    gc.collect()
    gc.freeze()


def parse_announcement(line: str) -> tuple[str, str] | None:
    """Return the role and the address, or None for any other line."""
    if not line.startswith(READY_PREFIX):
        return None
    role, address = line.removeprefix(READY_PREFIX).split()
    return role, address


@asynccontextmanager
async def stop_signal() -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set by the first SIGTERM or SIGINT.

    A second signal ends the process at once.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    yield stopped


def _bind(server: aio.Server, host: str, port: int, tls: TlsConfig) -> int:
    check_port(host, port)  # gRPC's own error gives no reason
    try:
        if tls.listens:
            return server.add_secure_port(f"{host}:{port}", grpc_credentials(tls))
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}; choose another --port, or 0 for any"
        ) from error


def enable_reflection(service_names: Sequence[str], server: aio.Server) -> None:
    """Enable reflection for these services and itself. Both versions have the same messages."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer(
        (*service_names, V1_SERVICE, reflection.SERVICE_NAME)
    )
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(V1_SERVICE, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handlers,))


def _describe_v1() -> None:
    """Add v1's file, which grpcio-reflection lacks, to the default descriptor pool."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(V1_FILE)
        return
    except KeyError:
        described = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    described.name, described.package = V1_FILE, V1
    for message in described.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(f".{V1ALPHA}.", f".{V1}.")
    for service in described.service:
        for call in service.method:
            call.input_type = call.input_type.replace(f".{V1ALPHA}.", f".{V1}.")
            call.output_type = call.output_type.replace(f".{V1ALPHA}.", f".{V1}.")
    pool.AddSerializedFile(described.SerializeToString())
