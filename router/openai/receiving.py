"""What comes in over HTTP: a body of bounded size, and word of a client that hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from serving.errors import ClientGone, MessageTooLarge

MOST_BODY_BYTES = 16 << 20


async def read_body(request: Request) -> bytes:
    """Raises MessageTooLarge, and ClientGone when the rest never comes."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY_BYTES:
                raise MessageTooLarge(
                    f"the body has more than {MOST_BODY_BYTES >> 20} MiB; send a shorter prompt"
                )
    except ClientDisconnect as error:
        raise ClientGone("the client disconnected before its whole request had come") from error
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, but for a client that hangs up: then it is cancelled, and nodes stop."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_hangs_up(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (working, leaving):
            each.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _hangs_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        """What follows a body is of no account."""
