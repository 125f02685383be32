"""Client of Responses over WebSocket, for routers in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

PATH = "/v1/responses"
LAST_EVENTS = ("error", "response.completed", "response.incomplete", "response.failed")
ASK: dict[str, Any] = {
    "type": "response.create",
    "model": "tiny",
    "input": "the quick",
    "max_output_tokens": 4,
}


@dataclass(frozen=True, slots=True)
class ResponseSocket:
    connection: ClientConnection

    async def send(self, **fields: Any) -> None:
        await self.connection.send(json.dumps({**ASK, **fields}))

    async def receive(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.connection.recv())
        return event

    async def receive_all(self) -> list[dict[str, Any]]:
        """Return the events of one response."""
        events = [await self.receive()]
        while events[-1]["type"] not in LAST_EVENTS:
            events.append(await self.receive())
        return events

    async def ask(self, **fields: Any) -> dict[str, Any]:
        """Return the last event of one response."""
        await self.send(**fields)
        return (await self.receive_all())[-1]

    async def wait_for_close(self) -> int | None:
        await self.connection.wait_closed()
        return self.connection.close_code


@asynccontextmanager
async def a_response_socket(
    address: str, headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[ResponseSocket]:
    url = f"ws://{address}{PATH}"
    async with connect(
        url, additional_headers=headers, max_size=None, proxy=None, **options
    ) as connection:
        yield ResponseSocket(connection)
