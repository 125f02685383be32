"""gRPC servicer of the prefill node, and the sends that its calls wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from baton.core.ids import HandoffId
from baton.node.call_server import CallServer
from baton.v1 import node_pb2, node_pb2_grpc


class PrefillServicer(node_pb2_grpc.PrefillServiceServicer):
    def __init__(self, calls: CallServer) -> None:
        self._calls = calls

    def Prefill(
        self,
        request_iterator: AsyncIterator[node_pb2.PrefillRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.PrefillResponse, None]:
        return self._calls.serve(request_iterator, context)


class PendingSends:
    """Pending sends. `give_up` is called for a hand-off whose call ends before its last write."""

    def __init__(self, give_up: Callable[[HandoffId], None]) -> None:
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._events: dict[HandoffId, asyncio.Event] = {}

    @contextmanager
    def expect_send(self, handoff_id: HandoffId) -> Iterator[asyncio.Event]:
        """Yield an event that is set after the last write."""
        event = self._events[handoff_id] = asyncio.Event()
        try:
            yield event
        finally:
            del self._events[handoff_id]
            if not event.is_set():
                self._give_up(handoff_id)

    def mark_ended(self, handoff_id: HandoffId) -> None:
        """Mark a send as ended. Called on the engine thread."""
        self._loop.call_soon_threadsafe(self._set, handoff_id)

    def _set(self, handoff_id: HandoffId) -> None:
        event = self._events.get(handoff_id)
        if event is not None:
            event.set()
