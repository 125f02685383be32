"""Calls to the nodes of an attempt, merged into one queue of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from baton.core.legs import LegKind
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.router.routing.policy import Leg
from baton.router.tracing import UNTRACED, RequestTrace
from baton.rpc.errors import ClientTooSlow
from baton.rpc.messages.calls import CallReport

# Steps of an answer buffered for a client that does not read: enough for minutes.
MAX_WAITING = 8192


class LegOutput(NamedTuple):
    """Tokens from one leg. A tuple because one is created per token."""

    leg: LegKind
    outputs: tuple[Output, ...]
    report: CallReport | None = None


class LegEnded(NamedTuple):
    leg: LegKind
    error: Exception | None = None


LegEvent = LegOutput | LegEnded
# Receives each event of a leg as soon as it arrives; must not block.
Deliver = Callable[[LegEvent], None]
LegCall = Callable[[], Awaitable[None]]


class NodeCalls(Protocol):
    """RPCs to nodes.

    A call returns when it has ended, and raises one of `rpc.errors`. After `timeout_s` the node
    cancels the request, and the call raises DeadlineExceeded. None: no timeout.
    """

    async def call(
        self,
        leg: Leg,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None: ...


class Events:
    """Queue of the events of all legs, in order of arrival.

    Queued outputs without logprobs are merged, so that a slow client catches up with fewer
    messages. The queue is bounded: a client that does not read at all loses its own request only.
    """

    def __init__(self) -> None:
        self._waiting: deque[LegEvent] = deque()
        self._arrived: asyncio.Future[None] | None = None  # while `next` waits

    def put(self, event: LegEvent) -> None:
        """Append an event. Raises ClientTooSlow, which ends the leg, if too many outputs wait."""
        if len(self._waiting) >= MAX_WAITING and isinstance(event, LegOutput):
            raise ClientTooSlow(f"the client left {MAX_WAITING} steps of its answer unread")
        self._waiting.append(event)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def next(self) -> LegEvent:
        if not self._waiting:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        event = self._waiting.popleft()
        if isinstance(event, LegOutput) and self._waiting:
            if event.outputs[0].logprobs:
                # As large as many plain events: let the event loop run in between.
                await asyncio.sleep(0)
                return event
            more = tuple(self._pop_more(event.leg))
            return LegOutput(event.leg, event.outputs + more, event.report)
        return event

    def ended_legs(self) -> list[LegEnded]:
        """Return the ends of legs that wait in the queue, and leave them there."""
        return [event for event in self._waiting if isinstance(event, LegEnded)]

    def _pop_more(self, leg: LegKind) -> Iterator[Output]:
        while self._waiting:
            event = self._waiting[0]
            if not isinstance(event, LegOutput) or event.leg is not leg:
                return
            if event.report is not None or event.outputs[0].logprobs:
                return
            self._waiting.popleft()
            yield from event.outputs


@asynccontextmanager
async def under_way(events: Events, calls: dict[LegKind, LegCall]) -> AsyncIterator[None]:
    """Run all legs concurrently, delivering to `events`. Leaving the block cancels them."""
    tasks = [asyncio.ensure_future(_run_leg(leg, call, events)) for leg, call in calls.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_leg(leg: LegKind, call: LegCall, events: Events) -> None:
    failure = None
    try:
        await call()
    except Exception as error:  # noqa: BLE001 - raised again by the consumer of the events
        failure = error
    events.put(LegEnded(leg, failure))
