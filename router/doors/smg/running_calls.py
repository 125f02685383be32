"""Generate calls in progress, which their clients abort by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from baton.rpc.errors import RequestIdInUse

Item = TypeVar("Item")


class _Call:
    def __init__(self) -> None:
        self.is_aborted = False
        self._wait: asyncio.Timeout | None = None  # for an item

    def abort(self) -> None:
        if self._wait is not None and not self.is_aborted:
            self._wait.reschedule(0)
        self.is_aborted = True

    async def next_of(self, items: AsyncGenerator[Item, None]) -> Item | None:
        """Return the next item; None at the end. Raises TimeoutError when aborted."""
        async with asyncio.timeout(None) as wait:
            self._wait = wait
            try:
                return await anext(items, None)
            finally:
                self._wait = None


class RunningCalls:
    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], _Call] = {}  # by owner and id

    def abort(self, request_id: str, owner: str) -> None:
        """End a request of this owner in any state, if there is one."""
        call = self._calls.get((owner, request_id))
        if call is not None:
            call.abort()

    async def until_aborted(
        self, request_id: str, owner: str, items: AsyncGenerator[Item, None]
    ) -> AsyncGenerator[Item, None]:
        """Yield the items until they end or the request is aborted. Raises RequestIdInUse."""
        key = owner, request_id
        if key in self._calls:
            raise RequestIdInUse(f"request {request_id!r} is under way; choose another id")
        call = self._calls[key] = _Call()
        try:
            async with aclosing(items):
                while not call.is_aborted and (item := await call.next_of(items)) is not None:
                    yield item
        except TimeoutError:
            if not call.is_aborted:
                raise
        finally:
            del self._calls[key]
