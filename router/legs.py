"""The two calls that serve one try, and how they are listened to at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.request import Output
from kv_transfer.types import HandoffId
from router.nodes import Node
from router.values import DecodeSummary
from serving.translate_sequence import Sequence as TokenSequence


class Leg(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LegOutput:
    leg: Leg
    output: Output


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
    ) -> LegStream: ...

    def decode(
        self,
        node: Node,
        handoff_id: HandoffId,
        sequence: TokenSequence,
        prefill: Node | None,
        *,
        timeout_s: float | None = None,
    ) -> LegStream: ...


@asynccontextmanager
async def together(
    streams: Sequence[tuple[Leg, LegStream]],
) -> AsyncIterator[asyncio.Queue[LegEvent]]:
    """What comes of all legs, in the order it came. Leaving the block cancels them all."""
    events: asyncio.Queue[LegEvent] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_listen(leg, stream, events)) for leg, stream in streams]
    try:
        yield events
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(leg: Leg, stream: LegStream, events: asyncio.Queue[LegEvent]) -> None:
    try:
        async with aclosing(stream):
            async for event in stream:
                events.put_nowait(event)
    except Exception as error:  # noqa: BLE001 - whoever waits for the events raises it again
        events.put_nowait(LegFailed(leg, error))
    else:
        events.put_nowait(LegEnded(leg))
