"""Carries the control links of the KV worker over gRPC streams.

The worker half calls `dial`, `send` and `close` on the engine's thread; the streams live on
the asyncio loop; what comes in goes to the worker's inbox, which any thread may fill. No other
state is shared: whatever crosses does so through `call_soon_threadsafe` one way, and through the
inbox and the engine's mailbox the other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Any

from grpc import RpcError, StatusCode

from baton.v1 import kv_link_pb2, kv_link_pb2_grpc
from kv_transfer.link import LinkEvents, LinkId
from kv_transfer.messages import LinkMessage
from serving.channel import open_channel
from serving.status import NAMED, remote_error
from serving.tls import PLAIN, TlsConfig
from serving.tls_trouble import tls_trouble
from serving.translate_link import link_message_from, link_message_to

# How long a silent peer may hold up the end of a link.
CLOSE_TIMEOUT_S = 1.0
PULSE_S = 1.0

Post = Callable[[Callable[[], None]], None]


def _wake() -> None:
    """A letter that says no more than: look again."""


Outbox = asyncio.Queue[LinkMessage | None]  # None: nothing more will be sent


class GrpcLinks:
    """All links of one process, dialled and accepted, from `async with` to its end.

    Made before the worker that uses it; `attach` closes the circle before the first use.
    """

    def __init__(self, tls: TlsConfig = PLAIN) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._outbox_by_link: dict[LinkId, Outbox] = {}
        self._streams: set[asyncio.Task[None]] = set()

    def attach(self, events: LinkEvents, post: Post) -> None:
        """From now on `events` is told on the asyncio loop, and `post` wakes its thread.

        Told at once and not by letter: the engine reads no letters inside a step, but its KV
        worker looks between two layers, and a grant or a renewal shall not wait for seconds.
        """
        self._events = events
        self._post = post

    async def __aenter__(self) -> GrpcLinks:
        self._pulse = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every link after what was sent on it."""
        self._pulse.cancel()
        for link_id in list(self._outbox_by_link):
            self._close(link_id)
        if self._streams:
            _, stuck = await asyncio.wait(self._streams, timeout=CLOSE_TIMEOUT_S)
            for stream in stuck:
                stream.cancel()

    # --- Called on the engine's thread; `send` on any. ---

    def dial(self, address: str) -> LinkId:
        link_id = LinkId(next(self._ids))
        self._loop.call_soon_threadsafe(self._begin, link_id, address)
        return link_id

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        self._loop.call_soon_threadsafe(self._send, link_id, message)

    def close(self, link_id: LinkId) -> None:
        self._loop.call_soon_threadsafe(self._close, link_id)

    # --- On the asyncio loop. ---

    async def accept(
        self, requests: AsyncIterator[kv_link_pb2.LinkRequest]
    ) -> AsyncGenerator[kv_link_pb2.LinkResponse, None]:
        """One accepted stream, for as long as either side wants it. Raises what is named of a
        message that cannot be believed.
        """
        link_id = LinkId(next(self._ids))
        outbox = self._outbox_by_link[link_id] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read(link_id, requests))
        self._keep(reading)
        try:
            while (message := await outbox.get()) is not None:
                yield kv_link_pb2.LinkResponse(message=link_message_to(message))
            if reading.done():
                reading.result()  # tells what cannot be believed
        finally:
            reading.cancel()
            self._lose(link_id, "the peer broke off the link")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._events.pulse()

    def _begin(self, link_id: LinkId, address: str) -> None:
        outbox = self._outbox_by_link[link_id] = asyncio.Queue()
        self._keep(asyncio.ensure_future(self._dialled(link_id, address, outbox)))

    async def _dialled(self, link_id: LinkId, address: str, outbox: Outbox) -> None:
        async with open_channel(address, self._tls) as channel:
            call = kv_link_pb2_grpc.KvLinkServiceStub(channel).Link(_requests(outbox))
            await self._read(link_id, call, address)

    async def _read(
        self, link_id: LinkId, incoming: AsyncIterable[Any], dialled: str | None = None
    ) -> None:
        reason = "the peer closed the link"
        is_made = False
        try:
            async for envelope in incoming:
                is_made = True
                message = link_message_from(envelope.message)
                if message is not None:
                    self._events.deliver(link_id, message)
                    self._post(_wake)
        except RpcError as error:
            reason = remote_error(error).message
            # A link that was made is told lost at once: requests wait to go on elsewhere.
            if not is_made and dialled is not None and error.code() is StatusCode.UNAVAILABLE:
                trouble = await asyncio.to_thread(tls_trouble, dialled, self._tls)
                reason = trouble or reason
        except NAMED as error:
            reason = str(error)
            if dialled is None:
                raise  # who dialled is told
        finally:
            self._lose(link_id, reason)

    def _send(self, link_id: LinkId, message: LinkMessage) -> None:
        outbox = self._outbox_by_link.get(link_id)
        if outbox is not None:
            outbox.put_nowait(message)

    def _close(self, link_id: LinkId) -> None:
        outbox = self._outbox_by_link.pop(link_id, None)
        if outbox is not None:
            outbox.put_nowait(None)

    def _lose(self, link_id: LinkId, reason: str) -> None:
        """Tells of the end of a link once, and not at all if this side closed it."""
        if link_id not in self._outbox_by_link:
            return
        self._close(link_id)
        self._events.lost(link_id, reason)
        self._post(_wake)

    def _keep(self, stream: asyncio.Task[None]) -> None:
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)


async def _requests(outbox: Outbox) -> AsyncIterator[kv_link_pb2.LinkRequest]:
    while (message := await outbox.get()) is not None:
        yield kv_link_pb2.LinkRequest(message=link_message_to(message))
