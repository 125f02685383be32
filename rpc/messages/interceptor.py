"""Interceptor of all methods: refuses invalid messages, closes the generators of responses."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from baton.rpc.errors import ServiceError, Unreadable
from baton.rpc.messages.wire_gauge import check_num_fields
from baton.rpc.security.token_gate import Continuation, Handler
from baton.rpc.status import named_errors

Context = aio.ServicerContext[Any, Any]
# Fields of a handler's method. Keys: requests are a stream, responses are a stream.
KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


@dataclass(frozen=True, slots=True)
class _Refused:
    """Placeholder for a message that was refused while it was deserialized."""

    refusal: ServiceError


class MessageInterceptor(aio.ServerInterceptor):
    """Refuses invalid messages by `Unreadable` instead of UNKNOWN.

    With `is_gauged`, messages with too many fields are refused, too. The generator of a streaming
    method is closed when its call ends. gRPC only drops that of a call which is cancelled between
    two responses: the request behind it would continue until the garbage collector runs.
    """

    def __init__(self, *, is_gauged: bool = False) -> None:
        self._is_gauged = is_gauged

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        kind = KINDS[handler.request_streaming, handler.response_streaming]
        changed = {
            "request_deserializer": _refusing_deserializer(
                handler.request_deserializer, is_gauged=self._is_gauged
            ),
            kind: _checked(getattr(handler, kind)),
        }
        return handler._replace(**changed)  # type: ignore[no-any-return]


def _refusing_deserializer(
    read: Callable[[bytes], Any], *, is_gauged: bool
) -> Callable[[bytes], Any]:
    kind: Any = getattr(read, "__self__", None)  # message class of a bound FromString

    def read_or_refuse(raw: bytes) -> Any:
        try:
            if is_gauged and kind is not None:
                check_num_fields(raw, kind.DESCRIPTOR)
            return read(raw)
        except ServiceError as refusal:
            return _Refused(refusal)
        except DecodeError as error:
            return _Refused(Unreadable(str(error)))

    return read_or_refuse


def _checked(method: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """Wrap a method, unary or streaming, which then raises the refusals of its requests."""

    async def checked(request: Any, context: Context) -> Any:
        if isinstance(request, _Refused):
            async with named_errors(context):
                raise request.refusal
        if isinstance(request, AsyncIterator):
            request = _each_readable(request)
        responses = method(request, context)
        if not inspect.isasyncgen(responses):
            return await responses
        async with aclosing(responses):
            async for response in responses:
                await context.write(response)
        return None

    return checked


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Refused):
            raise request.refusal
        yield request
