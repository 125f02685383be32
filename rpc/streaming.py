"""Decorator that closes the generators of streaming servicer methods."""

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
    """Close the method's generator when the call ends, also by cancellation.

    gRPC drops a generator whose call is cancelled between two responses without closing it. The
    request behind it would continue until the garbage collector runs.
    """

    @wraps(method)
    async def write_all(self: S, request: Request, context: Context) -> None:
        async with aclosing(method(self, request, context)) as responses:
            async for response in responses:
                await context.write(response)

    # gRPC accepts coroutines and generators, but the generated base class declares generators only.
    return cast("Callable[[S, Request, Context], AsyncIterator[Response]]", write_all)
