"""gRPC interceptor that checks bearer tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from grpc import aio
from grpc_status import rpc_status

from baton.rpc.errors import Unauthenticated
from baton.rpc.health import HEALTH
from baton.rpc.security.token import HEADER, AcceptedTokens
from baton.rpc.status import reason_of, status_of

# In quotes, since gRPC's class is not generic at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
# Fields of a handler's method. Keys: requests are a stream, responses are a stream.
KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def ignore_refusal(_reason: str) -> None:
    """Ignore the refusal, for servers without metrics."""


class TokenInterceptor(aio.ServerInterceptor):
    """Requires a token for every service except health, whose probes send none."""

    def __init__(
        self, accepted: AcceptedTokens, on_refusal: Callable[[str], None] = ignore_refusal
    ) -> None:
        self._accepted = accepted
        self._on_refusal = on_refusal  # called with the reason

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(f"/{HEALTH}/"):
            return handler
        try:
            self._accepted.check(sent_token(handler_call_details.invocation_metadata))
        except Unauthenticated as refusal:
            self._on_refusal(reason_of(Unauthenticated))
            return _refusing_handler(handler, refusal)
        return handler


def sent_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the authorization of a call, with its scheme."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            return value
    return None


def _refusing_handler(handler: Any, refusal: Unauthenticated) -> Handler:
    """Return a handler that refuses every call without reading its requests."""
    status = rpc_status.to_status(status_of(refusal))

    async def refuse(_request: object, context: aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(status)

    method = {KINDS[handler.request_streaming, handler.response_streaming]: refuse}
    return handler._replace(  # type: ignore[no-any-return]
        request_deserializer=None, response_serializer=None, **method
    )
