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
# Keys: requests are a stream, responses are a stream.
HANDLER_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
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


def _refusing_handler(handler: Handler, refusal: Unauthenticated) -> Handler:
    status = rpc_status.to_status(status_of(refusal))

    async def refuse(_request: object, context: aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(status)

    return HANDLER_FACTORIES[handler.request_streaming, handler.response_streaming](refuse)
