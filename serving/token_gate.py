"""Lets in whoever shows a token that is taken here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from grpc import aio
from grpc_status import rpc_status

from serving.errors import Unauthenticated
from serving.health import HEALTH
from serving.status import reason_of, status_of
from serving.token import HEADER, AcceptedTokens

# In quotes: gRPC's own class takes no parameters.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
# By whether requests and responses are streams.
MAKE_HANDLER = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def nobody_counts(_reason: str) -> None:
    """For servers without metrics."""


class TokenGate(aio.ServerInterceptor):
    """Before every service but health, whose probes carry no tokens and learn nothing else."""

    def __init__(
        self, accepted: AcceptedTokens, on_refusal: Callable[[str], None] = nobody_counts
    ) -> None:
        self._accepted = accepted
        self._on_refusal = on_refusal  # hears the reason

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(f"/{HEALTH}/"):
            return handler
        try:
            self._accepted.check(_shown(handler_call_details))
        except Unauthenticated as refusal:
            self._on_refusal(reason_of(Unauthenticated))
            return _refusing(handler, refusal)
        return handler


def _shown(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata:
        if key == HEADER and isinstance(value, str):
            return value
    return None


def _refusing(handler: Handler, refusal: Unauthenticated) -> Handler:
    """Refuses in place of the handler, whatever shape that has."""
    status = rpc_status.to_status(status_of(refusal))

    async def refuse(_request: object, context: aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(status)

    return MAKE_HANDLER[handler.request_streaming, handler.response_streaming](refuse)
