"""gRPC implementation of `NodeCalls`."""

from __future__ import annotations

import asyncio

import grpc
from grpc import aio

from baton.core.errors import NamedError
from baton.core.ids import RequestId
from baton.core.legs import role_of
from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.engine.errors import EngineGone, EngineKilled, EngineStopped, PassFailed
from baton.router.dispatch.node_rpcs import Deliver, LegOutput
from baton.router.dispatch.node_stream import NodeStream
from baton.router.routing.nodes import Node
from baton.router.routing.policy import Leg
from baton.router.tracing import UNTRACED, RequestTrace
from baton.rpc.channel import open_channel
from baton.rpc.errors import (
    AdapterNotLoaded,
    AdaptersBusy,
    AdapterUnreadable,
    DeadlineExceeded,
    Draining,
    FailureKind,
    GenerationFailed,
    KvLoadFailed,
    MessageTooLarge,
    NodeDraining,
    NodeFailed,
)
from baton.rpc.messages.calls import leg_order, report_from
from baton.rpc.messages.conversion import output_from
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.tls_trouble import connection_trouble
from baton.rpc.status import RemoteError, RemoteFailure, invalid_request_in, reason_of, remote_error
from baton.telemetry.tracing.request_timeline import leg_name
from baton.v1 import node_pb2, node_pb2_grpc

# Time for calls to an address that is no longer used.
CLOSE_GRACE_S = 3600.0
CONNECT_TIMEOUT_S = 5.0
CLIENT_ERROR_CODES = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})

# Status codes of a broken connection, and gRPC's message when there was no connection.
BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL})
NEVER_CONNECTED = "failed to connect"
NOT_STARTED_REASONS = frozenset({reason_of(Draining), reason_of(EngineGone)})
NOT_LOADED_REASONS = frozenset({reason_of(AdaptersBusy), reason_of(AdapterUnreadable)})
KINDS = {
    reason_of(EngineStopped): FailureKind.ENGINE_FAILED,
    reason_of(EngineKilled): FailureKind.VANISHED,
    reason_of(PassFailed): FailureKind.PASS_FAILED,
    reason_of(KvLoadFailed): FailureKind.KV_LOST,
}


class Connection:
    """Channel to one address, and the multiplexed stream of legs on it."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.legs = NodeStream(node_pb2_grpc.LegServiceStub(channel).Serve)

    async def close(self, grace_s: float | None = None) -> None:
        """Close after the current calls have ended, at most after `grace_s`."""
        self.legs.close_when_idle()
        await self.channel.close(grace_s)
        await self.legs.closed()


class GrpcNodeCalls:
    """Calls nodes over one connection per address, opened at its first use."""

    def __init__(self, tls: TlsConfig = PLAIN) -> None:
        self._tls = tls
        self._connection_by_address: dict[str, Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> GrpcNodeCalls:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for closing in self._closing:
            closing.cancel()
        for connection in self._connection_by_address.values():
            await connection.close()

    def channel(self, address: str) -> aio.Channel:
        return self._connection(address).channel

    def _connection(self, address: str) -> Connection:
        if address not in self._connection_by_address:
            self._connection_by_address[address] = Connection(open_channel(address, self._tls))
        return self._connection_by_address[address]

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._connection_by_address)

    def connection_trouble(self, address: str, details: str) -> str | None:
        """Return a cause of gRPC's failure that has to do with TLS, or may have."""
        return connection_trouble(address, self._tls, details)

    def forget(self, address: str) -> None:
        """Drop the connection to an address. Calls in flight may end first."""
        connection = self._connection_by_address.pop(address, None)
        if connection is not None:
            closing = asyncio.ensure_future(connection.close(CLOSE_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def call(
        self,
        leg: Leg,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        kind, node = leg.kind, leg.node

        def handle(event: node_pb2.CallEvent) -> None:
            output = _parse_output(event.output, request.request_id)
            # A call that sends KV goes on until the last write.
            if output.finish_reason is not None and request.send_to is None:
                call.finished()
            deliver(LegOutput(kind, (output,), report_from(event)))

        order = leg_order(kind, request)
        try:
            with trace.leg(leg_name(kind, request.task), node) as call:
                order.context.metadata.update(call.metadata)
                await self._connection(node.address).legs.call(order, handle, timeout_s)
        except (grpc.RpcError, RemoteFailure) as error:
            raise _named_error(error, node) from error

    async def connect(self, decode: Node, prefill: Node) -> None:
        """Have a decode node open its data path to a prefill node. Raises NodeFailed."""
        stub = node_pb2_grpc.LegServiceStub(self.channel(decode.address))
        peer = node_pb2.Peer(node_id=prefill.card.node_id, address=prefill.address)
        try:
            await stub.Connect(node_pb2.ConnectRequest(prefill=peer), timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _named_error(error, decode) from error


def _named_error(error: grpc.RpcError | RemoteFailure, node: Node) -> NamedError:
    """Convert a gRPC error to a named error that mentions the node."""
    remote = remote_error(error)
    who = f"{role_of(node.card.legs)} node {node.card.node_id} at {node.address}"
    if remote.code in CLIENT_ERROR_CODES:
        return invalid_request_in(remote)
    if remote.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the client's deadline passed while {who} worked")
    if remote.reason == reason_of(MessageTooLarge):
        return MessageTooLarge(remote.message)
    message = f"{who}: {remote.code.name}: {remote.message}"
    if remote.reason in NOT_STARTED_REASONS:
        return NodeDraining(message)
    if remote.reason in NOT_LOADED_REASONS:
        return AdapterNotLoaded(message)
    return NodeFailed(message, failure_kind(remote))


def failure_kind(remote: RemoteError) -> FailureKind:
    """Classify a failure: reported by the node, connection broken, or never connected."""
    if remote.reason is not None:
        return KINDS.get(remote.reason, FailureKind.OTHER)
    was_connected = NEVER_CONNECTED not in remote.message.lower()
    is_broken = remote.code in BROKEN and was_connected
    return FailureKind.VANISHED if is_broken else FailureKind.OTHER


def _parse_output(message: node_pb2.TokenOutput, request_id: RequestId) -> Output:
    output = output_from(message, request_id)
    if output.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(message.error or "the engine gave no reason")
    if output.finish_reason is FinishReason.ABORT:
        raise NodeDraining("the node was paused and has aborted the request")
    return output
