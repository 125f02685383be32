"""The two calls that serve one try, and how they are listened to at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.request import Output
from kv_transfer.types import HandoffId
from router.nodes import Node
from router.tracing import UNTRACED, Trace
from router.values import DecodeSummary
from serving.translate_sequence import Sequence as TokenSequence


class Leg(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LegOutput:
    leg: Leg
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class LegSummary:
    summary: DecodeSummary


@dataclass(frozen=True, slots=True)
class LegEnded:
    """The call came to its proper end."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class LegFailed:
    leg: Leg
    error: Exception


LegEvent = LegOutput | LegSummary | LegEnded | LegFailed
LegStream = AsyncGenerator[LegEvent, None]


class NodeCalls(Protocol):
    """How nodes are asked. A stream that fails raises one of `serving.errors`.

    After `timeout_s` the node gives the request up by itself, and the stream raises
    DeadlineExceeded; None lets it go on.
    """

    def prefill(
        self,
        node: Node,
        handoff_id: HandoffId,
        sequence: TokenSequence,
        *,
        timeout_s: float | None = None,
        trace: Trace = UNTRACED,
    ) -> LegStream: ...

    def decode(
        self,
        node: Node,
        handoff_id: HandoffId,
        sequence: TokenSequence,
        prefill: Node | None,
        *,
        timeout_s: float | None = None,
        trace: Trace = UNTRACED,
    ) -> LegStream: ...


class Events:
    """What came of all legs, in the order it came.

    Outputs that wait are taken as one: whoever falls behind catches up with fewer messages.
    """

    def __init__(self) -> None:
        self._waiting: deque[LegEvent] = deque()
        self._came = asyncio.Event()

    def put(self, event: LegEvent) -> None:
        self._waiting.append(event)
        self._came.set()

    async def next(self) -> LegEvent:
        if not self._waiting:
            self._came.clear()
            await self._came.wait()
        event = self._waiting.popleft()
        if isinstance(event, LegOutput) and self._waiting:
            return LegOutput(event.leg, event.outputs + tuple(self._more_of(event.leg)))
        return event

    def _more_of(self, leg: Leg) -> Iterator[Output]:
        while self._waiting:
            event = self._waiting[0]
            if not isinstance(event, LegOutput) or event.leg is not leg:
                return
            self._waiting.popleft()
            yield from event.outputs


@asynccontextmanager
async def together(streams: Sequence[tuple[Leg, LegStream]]) -> AsyncIterator[Events]:
    """Listens to all legs. Leaving the block cancels them."""
    events = Events()
    tasks = [asyncio.ensure_future(_listen(leg, stream, events)) for leg, stream in streams]
    try:
        yield events
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(leg: Leg, stream: LegStream, events: Events) -> None:
    try:
        async with aclosing(stream):
            async for event in stream:
                events.put(event)
    except Exception as error:  # noqa: BLE001 - whoever waits for the events raises it again
        events.put(LegFailed(leg, error))
    else:
        events.put(LegEnded(leg))
