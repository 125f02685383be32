"""gRPC implementation of `NodeCalls`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc import StatusCode, aio

from baton.core.errors import NamedError
from baton.core.ids import RequestId
from baton.core.legs import role_of
from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.engine.errors import EngineGone, EngineKilled, EngineStopped, PassFailed
from baton.router.dispatch.node_rpcs import Deliver, LegOutput
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
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
from baton.rpc.messages.limits import MAX_EVENT_BYTES
from baton.rpc.security.tls import PLAIN, TlsConfig, connection_trouble
from baton.rpc.status import (
    TOO_LARGE,
    TOO_LARGE_ADVICE,
    RemoteError,
    RemoteFailure,
    invalid_request_in,
    reason_of,
    remote_error,
    remote_error_in,
)
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
# Once a node has drained: it has not started what it has not answered.
ENDED = RemoteError(StatusCode.UNAVAILABLE, "the node ended the stream", reason_of(Draining))
CLOSED = RemoteError(StatusCode.UNAVAILABLE, "the router closed the stream")
LATE = RemoteError(StatusCode.DEADLINE_EXCEEDED, "the node did not report the deadline in time")

Method = aio.StreamStreamMultiCallable[node_pb2.ServeRequest, node_pb2.ServeResponse]
# Receives each event as soon as it is read; must not block. An exception from it ends the call.
Take = Callable[[node_pb2.CallEvent], None]


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


class NodeStream:
    """Stream to a node, opened by the first call and reopened by the next one after it broke.

    One message holds the output of a whole engine step for all requests.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._numbers = itertools.count(1)
        self._stream: _Stream | None = None

    async def call(
        self, order: node_pb2.LegOrder, take: Take, timeout_s: float | None = None
    ) -> None:
        """Start a call and return when it has ended. Cancellation cancels it on the node.

        Raises RemoteFailure, also if the stream breaks, and MessageTooLarge.
        """
        number = next(self._numbers)
        if timeout_s is not None:
            order.context.timeout_s = timeout_s
        request = node_pb2.ServeRequest(call=number, start=order)
        if request.ByteSize() > MAX_EVENT_BYTES:
            sizes = f"{request.ByteSize()} vs. {MAX_EVENT_BYTES}"
            raise MessageTooLarge(f"{TOO_LARGE} ({sizes}); {TOO_LARGE_ADVICE}")
        if self._stream is None or self._stream.is_over:
            self._stream = _Stream(self._method)
        stream, call = self._stream, _PendingCall(take)
        # The node enforces the deadline; the timer covers a node that does not respond.
        timer = None if timeout_s is None else call.loop.call_later(timeout_s, call.fail, LATE)
        stream.begin(number, request, call)
        try:
            await call.ended
        finally:
            if timer is not None:
                timer.cancel()
            stream.end(number)

    def close_when_idle(self) -> None:
        """Close the stream once the calls in flight have ended. No new call may follow."""
        if self._stream is not None:
            self._stream.close_when_idle()

    async def closed(self) -> None:
        """Wait until the stream has ended and its calls have failed or ended."""
        if self._stream is not None:
            await self._stream.over()


class _PendingCall:
    def __init__(self, take: Take) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._take = take

    def handle(self, event: node_pb2.CallEvent) -> bool:
        """Deliver an event. Return whether it was the last one."""
        if self.ended.done():
            return False  # the waiter has been scheduled
        if event.HasField("end"):
            self._end(event.end.status)
            return True
        try:
            self._take(event)
        except Exception as error:  # noqa: BLE001 - raised again by the waiter
            self.ended.set_exception(error)
        return False

    def fail(self, remote: RemoteError) -> None:
        if not self.ended.done():
            self.ended.set_exception(RemoteFailure(remote))

    def _end(self, status: bytes) -> None:
        if status:
            self.fail(remote_error_in(status_pb2.Status.FromString(status)))
        else:
            self.ended.set_result(None)


class _Stream:
    """One gRPC stream, until it breaks."""

    def __init__(self, method: Method) -> None:
        self._calls: dict[int, _PendingCall] = {}  # that the node has not ended
        self._requests: asyncio.Queue[node_pb2.ServeRequest | None] = asyncio.Queue()
        self._is_closing = False
        self._reading = asyncio.ensure_future(self._read(method(self._pop_requests())))
        self.is_over = False

    def begin(self, number: int, request: node_pb2.ServeRequest, call: _PendingCall) -> None:
        self._calls[number] = call
        self._requests.put_nowait(request)

    def end(self, number: int) -> None:
        """Cancel the call on the node, unless the node has ended it."""
        if self._calls.pop(number, None) is not None:
            cancel = node_pb2.ServeRequest(call=number, cancel=node_pb2.CancelOrder())
            self._requests.put_nowait(cancel)
        self._close_if_due()

    def close_when_idle(self) -> None:
        self._is_closing = True
        self._close_if_due()

    async def over(self) -> None:
        await asyncio.wait([self._reading])

    def _close_if_due(self) -> None:
        if self._is_closing and not self._calls:
            self._requests.put_nowait(None)

    async def _pop_requests(self) -> AsyncIterator[node_pb2.ServeRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self, stream: aio.StreamStreamCall[Any, Any]) -> None:
        failure = ENDED
        try:
            async for response in stream:
                for event in response.events:
                    call = self._calls.get(event.call)
                    if call is not None and call.handle(event):
                        del self._calls[event.call]
        except grpc.RpcError as error:
            failure = remote_error(error)
        except asyncio.CancelledError:
            failure = CLOSED
            raise
        finally:
            self._break(failure)

    def _break(self, failure: RemoteError) -> None:
        self.is_over = True
        self._requests.put_nowait(None)
        for call in self._calls.values():
            call.fail(failure)
        self._calls.clear()
