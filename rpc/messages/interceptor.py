"""Interceptor of all methods: refuses invalid messages, closes the generators of responses."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc import aio

from baton.rpc.errors import MessageTooLarge, ServiceError, Unreadable
from baton.rpc.security.token_gate import KINDS, Continuation, Handler
from baton.rpc.status import named_errors

Context = aio.ServicerContext[Any, Any]


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
            kind: self._checked(getattr(handler, kind)),
        }
        return handler._replace(**changed)  # type: ignore[no-any-return]

    def _checked(self, method: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
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


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Refused):
            raise request.refusal
        yield request


# Messages up to this size are not checked.
SMALL_BYTES = 1 << 16
# Includes entries of maps and lists, at every depth. A packed list of numbers is one field. An
# empty message in a list takes two bytes on the wire and thirty times as many once parsed.
MAX_FIELDS = 1 << 16
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def check_num_fields(raw: bytes, kind: Descriptor, max_fields: int = MAX_FIELDS) -> None:
    """Check the number of fields before a message is parsed.

    Raises MessageTooLarge, or Unreadable for wire types that Baton's messages do not use.

    Other malformed messages pass: the parser reports their errors.
    """
    if len(raw) <= SMALL_BYTES:
        return
    try:
        _check(raw, kind, max_fields)
    except IndexError:
        return


def _check(raw: bytes, kind: Descriptor, max_fields: int) -> None:
    num_fields = 0
    spans = [(0, len(raw), kind)]
    while spans:
        at, end, within = spans.pop()
        messages = _messages(within)
        while at < end:
            num_fields += 1
            if num_fields > max_fields:
                raise MessageTooLarge(
                    f"the message has more than {max_fields} fields, including entries of lists "
                    "and maps; send shorter ones"
                )
            # Fast path for one-byte varints, which most are, in this per-field loop.
            tag = raw[at]
            tag, at = (tag, at + 1) if tag < 0x80 else _varint(raw, at)
            wire_type = tag & 7
            if wire_type == LENGTH:
                size = raw[at]
                size, at = (size, at + 1) if size < 0x80 else _varint(raw, at)
                inner = messages.get(tag >> 3)
                if inner is not None:
                    spans.append((at, at + size, inner))
                at += size
            elif wire_type == VARINT:
                _, at = _varint(raw, at)
            elif wire_type in (FIXED64, FIXED32):
                at += 8 if wire_type == FIXED64 else 4
            else:
                raise Unreadable(f"wire type {wire_type} does not occur in messages of this method")


@lru_cache(maxsize=64)
def _messages(kind: Descriptor) -> Mapping[int, Descriptor]:
    """Return the message types of the fields that are messages, by field number."""
    return {
        field.number: field.message_type for field in kind.fields if field.message_type is not None
    }


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the varint at `at` and the index after it."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = raw[at]
        number |= (byte & 0x7F) << shift
        shift += 7
    return number, at + 1
