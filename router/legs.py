"""The two calls that serve one try, and how they are listened to at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from engine.request import Output
from kv_transfer.types import HandoffId
from router.nodes import Node
from router.tracing import UNTRACED, Trace
from router.values import DecodeSummary, PrefillSummary
from serving.errors import ClientTooSlow
from serving.translate_sequence import Sequence as TokenSequence

# Steps of an answer that may wait for a client which does not read: minutes of them.
MOST_WAITING = 8192


class Leg(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class LegOutput(NamedTuple):
    """A tuple, because one is made per token."""

    leg: Leg
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class LegSummary:
    summary: DecodeSummary | PrefillSummary


@dataclass(frozen=True, slots=True)
class LegEnded:
    """The call came to its proper end."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class LegFailed:
    leg: Leg
    error: Exception


LegEvent = LegOutput | LegSummary | LegEnded | LegFailed
# Takes what came of a leg, as soon as it is there; must not wait.
Deliver = Callable[[LegEvent], None]
LegCall = Callable[[], Awaitable[None]]


class NodeCalls(Protocol):
    """How nodes are asked. A call returns when it has ended, and raises one of `serving.errors`.

    After `timeout_s` the node gives the request up by itself, and the call raises
    DeadlineExceeded; None lets it go on.
    """

    async def prefill(
        self,
        node: Node,
        handoff_id: HandoffId,
        sequence: TokenSequence,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: Trace = UNTRACED,
    ) -> None: ...

    async def decode(
        self,
        node: Node,
        handoff_id: HandoffId,
        sequence: TokenSequence,
        prefill: Node | None,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: Trace = UNTRACED,
    ) -> None: ...


class Events:
    """What came of all legs, in the order it came.

    Outputs without logprobs that wait are taken as one: whoever falls behind catches up with fewer
    messages.
    A client that does not read at all costs its own request, and nobody else anything.
    """

    def __init__(self) -> None:
        self._waiting: deque[LegEvent] = deque()
        self._came: asyncio.Future[None] | None = None  # while somebody waits

    def put(self, event: LegEvent) -> None:
        """Raises ClientTooSlow, which ends the leg, for an output too many."""
        if len(self._waiting) >= MOST_WAITING and isinstance(event, LegOutput):
            raise ClientTooSlow(f"the client left {MOST_WAITING} steps of its answer unread")
        self._waiting.append(event)
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def next(self) -> LegEvent:
        if not self._waiting:
            self._came = asyncio.get_running_loop().create_future()
            await self._came
        event = self._waiting.popleft()
        if isinstance(event, LegOutput) and self._waiting:
            if event.outputs[0].logprobs:
                # Each has as much to write as many plain ones: the event loop goes on in between.
                await asyncio.sleep(0)
                return event
            return LegOutput(event.leg, event.outputs + tuple(self._more_of(event.leg)))
        return event

    def _more_of(self, leg: Leg) -> Iterator[Output]:
        while self._waiting:
            event = self._waiting[0]
            if not isinstance(event, LegOutput) or event.leg is not leg:
                return
            if event.outputs[0].logprobs:
                return
            self._waiting.popleft()
            yield from event.outputs


@asynccontextmanager
async def under_way(events: Events, calls: dict[Leg, LegCall]) -> AsyncIterator[None]:
    """All legs at once, which deliver to `events`. Leaving the block cancels them."""
    tasks = [asyncio.ensure_future(_ended(leg, call, events)) for leg, call in calls.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ended(leg: Leg, call: LegCall, events: Events) -> None:
    try:
        await call()
    except Exception as error:  # noqa: BLE001 - whoever waits for the events raises it again
        events.put(LegFailed(leg, error))
    else:
        events.put(LegEnded(leg))
