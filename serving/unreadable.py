"""Names what gRPC would end as an unknown failure: bytes that are no message of their method."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from serving.errors import ServiceError, Unreadable
from serving.status import named_errors
from serving.token_gate import Continuation, Handler
from serving.wire_gauge import check_num_fields

Context = aio.ServicerContext[Any, Any]
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True, slots=True)
class _NoMessage:
    """In the place of a message that could not be read, or is not to be."""

    refusal: ServiceError


class NamesUnreadable(aio.ServerInterceptor):
    """With `is_gauged`, messages of very many fields are refused before they are parsed."""

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
        kind = next(kind for kind in KINDS if getattr(handler, kind) is not None)
        changed = {
            "request_deserializer": _lenient(
                handler.request_deserializer, is_gauged=self._is_gauged
            ),
            kind: _checked(getattr(handler, kind)),
        }
        return handler._replace(**changed)  # type: ignore[no-any-return]


def _lenient(read: Callable[[bytes], Any], *, is_gauged: bool) -> Callable[[bytes], Any]:
    kind: Any = getattr(read, "__self__", None)  # of FromString, the message's class

    def read_or_tell(raw: bytes) -> Any:
        try:
            if is_gauged and kind is not None:
                check_num_fields(raw, kind.DESCRIPTOR)
            return read(raw)
        except ServiceError as refusal:
            return _NoMessage(refusal)
        except DecodeError as error:
            return _NoMessage(Unreadable(str(error)))

    return read_or_tell


def _checked(behave: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """Takes one request or a stream of them, as the method does."""

    async def checked(request: Any, context: Context) -> Any:
        async with named_errors(context):
            given = _readable(request)
        if not inspect.isasyncgenfunction(behave):
            return await behave(given, context)
        async for response in behave(given, context):
            await context.write(response)
        return None

    return checked


def _readable(request: Any) -> Any:
    if isinstance(request, AsyncIterator):
        return _each_readable(request)
    if isinstance(request, _NoMessage):
        raise request.refusal
    return request


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)
