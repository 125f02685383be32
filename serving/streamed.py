"""Streaming servicer methods whose end is certain."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, TypeVar, cast

from grpc import aio

S = TypeVar("S")
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = aio.ServicerContext[Any, Any]


def streamed(
    method: Callable[[S, Request, Context], AsyncGenerator[Response, None]],
) -> Callable[[S, Request, Context], AsyncIterator[Response]]:
    """Closes the method's generator when the call ends, however it ends.

    gRPC drops a generator whose call is cancelled between two responses and leaves its end to
    the garbage collector: the request behind it would go on until then.
    """

    @wraps(method)
    async def write_all(self: S, request: Request, context: Context) -> None:
        async with aclosing(method(self, request, context)) as responses:
            async for response in responses:
                await context.write(response)

    # gRPC takes both shapes; the generated base class knows one.
    return cast("Callable[[S, Request, Context], AsyncIterator[Response]]", write_all)
