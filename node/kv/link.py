"""Control links of the KV worker over gRPC streams, and their messages as protobuf.

The KV worker calls `dial`, `send` and `close` on the engine's thread. The streams run on the
asyncio loop. Received messages go to the worker's inbox, which is thread-safe. The threads share
no other state: calls to the loop use `call_soon_threadsafe`, calls to the engine's thread use the
inbox and the engine's mailbox.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from typing import Any

from grpc import RpcError

from baton.core.errors import NamedError
from baton.core.output import FirstToken
from baton.kv_transfer.link import LinkEvents, LinkId
from baton.kv_transfer.protocol.messages import (
    Closed,
    Done,
    Failed,
    Grant,
    Hello,
    LinkMessage,
    Renew,
    Renewed,
    Revoked,
    RevokeGrant,
    Writing,
)
from baton.rpc.channel import open_channel
from baton.rpc.messages.conversion import logprobs_from, logprobs_to
from baton.rpc.messages.mapper import Mapper
from baton.rpc.security.tls import PLAIN, TlsConfig, connection_trouble
from baton.rpc.status import remote_error
from baton.v1 import kv_link_pb2, kv_link_pb2_grpc

# Time for links to close in order before their streams are cancelled.
CLOSE_TIMEOUT_S = 1.0
PULSE_S = 1.0

Outbox = asyncio.Queue[LinkMessage | None]  # None: nothing more will be sent
# A Done's first token is two fields of the message.
FIRST_TOKEN = ("first_token", "first_token_id", "first_token_logprobs", "draft_state")
# By the name of the message in LinkMessage. mypy cannot express that each has types of its own.
MAPPERS: dict[str, Mapper[Any, Any]] = {
    "hello": Mapper(Hello, kv_link_pb2.Hello),
    "grant": Mapper(Grant, kv_link_pb2.Grant),
    "renew": Mapper(Renew, kv_link_pb2.Renew),
    "renewed": Mapper(Renewed, kv_link_pb2.Renewed),
    "revoke_grant": Mapper(RevokeGrant, kv_link_pb2.RevokeGrant),
    "revoked": Mapper(Revoked, kv_link_pb2.Revoked),
    "done": Mapper(Done, kv_link_pb2.Done, unmapped=FIRST_TOKEN),
    "failed": Mapper(Failed, kv_link_pb2.Failed),
    "closed": Mapper(Closed, kv_link_pb2.Closed),
    "writing": Mapper(Writing, kv_link_pb2.Writing),
}
NAME_BY_KIND: dict[type[LinkMessage], str] = {
    mapper.value: name for name, mapper in MAPPERS.items()
}


class GrpcLinks:
    """All links of one process, dialled and accepted. Use as an async context manager.

    Created before the KV worker that uses it. `attach` connects the two before the first use.
    """

    def __init__(self, tls: TlsConfig = PLAIN) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._outbox_by_link: dict[LinkId, Outbox] = {}
        self._streams: set[asyncio.Task[None]] = set()

    def attach(self, events: LinkEvents, wake: Callable[[], None]) -> None:
        """Deliver received messages to `events` from now on, and `wake` its thread.

        Messages bypass the engine's mailbox. The engine reads its mailbox only between steps,
        whereas its KV worker polls between layers: a grant or a renewal must not wait for seconds.
        """
        self._events = events
        self._wake = wake

    async def __aenter__(self) -> GrpcLinks:
        self._pulse = asyncio.ensure_future(self._send_pulses())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close all links after their queued messages have been sent."""
        self._pulse.cancel()
        for link_id in list(self._outbox_by_link):
            self._close(link_id)
        if self._streams:
            _, stuck = await asyncio.wait(self._streams, timeout=CLOSE_TIMEOUT_S)
            for stream in stuck:
                stream.cancel()

    # --- Called on the engine's thread; `send` on any thread. ---

    def dial(self, address: str) -> LinkId:
        link_id = LinkId(next(self._ids))
        self._loop.call_soon_threadsafe(self._start_dial, link_id, address)
        return link_id

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        self._loop.call_soon_threadsafe(self._send, link_id, message)

    def close(self, link_id: LinkId) -> None:
        self._loop.call_soon_threadsafe(self._close, link_id)

    # --- On the asyncio loop. ---

    async def accept(
        self, requests: AsyncIterator[kv_link_pb2.LinkRequest]
    ) -> AsyncGenerator[kv_link_pb2.LinkResponse, None]:
        """Serve one accepted stream until either side closes it.

        Raises the named error of an invalid message.
        """
        link_id = LinkId(next(self._ids))
        outbox = self._outbox_by_link[link_id] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read(link_id, requests))
        self._track(reading)
        try:
            while (message := await outbox.get()) is not None:
                yield kv_link_pb2.LinkResponse(message=link_message_to(message))
            if reading.done():
                reading.result()  # raises the error of an invalid message
        finally:
            reading.cancel()
            self._lose(link_id, "the peer broke off the link")

    async def _send_pulses(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._events.pulse()

    def _start_dial(self, link_id: LinkId, address: str) -> None:
        outbox = self._outbox_by_link[link_id] = asyncio.Queue()
        self._track(asyncio.ensure_future(self._run_dialled(link_id, address, outbox)))

    async def _run_dialled(self, link_id: LinkId, address: str, outbox: Outbox) -> None:
        async with open_channel(address, self._tls) as channel:
            call = kv_link_pb2_grpc.KvLinkServiceStub(channel).Link(_requests(outbox))
            await self._read(link_id, call, address)

    async def _read(
        self, link_id: LinkId, incoming: AsyncIterable[Any], dialled: str | None = None
    ) -> None:
        reason = "the peer closed the link"
        try:
            async for envelope in incoming:
                message = link_message_from(envelope.message)
                if message is not None:
                    self._events.deliver(link_id, message)
                    self._wake()
        except RpcError as error:
            reason = remote_error(error).message
            if dialled is not None:
                reason = connection_trouble(dialled, self._tls, reason) or reason
        except NamedError as error:
            reason = str(error)
            if dialled is None:
                raise  # becomes the status that the dialling peer receives
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
        """Report the end of a link once. Links that this side closed are not reported."""
        if link_id not in self._outbox_by_link:
            return
        self._close(link_id)
        self._events.lost(link_id, reason)
        self._wake()

    def _track(self, stream: asyncio.Task[None]) -> None:
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)


async def _requests(outbox: Outbox) -> AsyncIterator[kv_link_pb2.LinkRequest]:
    while (message := await outbox.get()) is not None:
        yield kv_link_pb2.LinkRequest(message=link_message_to(message))


def link_message_from(message: kv_link_pb2.LinkMessage) -> LinkMessage | None:
    """Return the value, or None for a message type that only a newer peer knows."""
    kind = message.WhichOneof("message")
    if kind is None:
        return None
    others: dict[str, Any] = {}
    if kind == "done":
        others["first_token"] = _first_token_from(message.done)
    value: LinkMessage = MAPPERS[kind].from_message(getattr(message, kind), **others)
    return value


def link_message_to(value: LinkMessage) -> kv_link_pb2.LinkMessage:
    others = _first_token_to(value.first_token) if isinstance(value, Done) else {}
    name = NAME_BY_KIND[type(value)]
    return kv_link_pb2.LinkMessage(**{name: MAPPERS[name].to_message(value, **others)})


def _first_token_from(message: kv_link_pb2.Done) -> FirstToken | None:
    if not message.HasField("first_token_id"):
        return None
    has_logprobs = message.HasField("first_token_logprobs")
    logprobs = logprobs_from(message.first_token_logprobs) if has_logprobs else None
    return FirstToken(message.first_token_id, logprobs, message.draft_state)


def _first_token_to(token: FirstToken | None) -> dict[str, Any]:
    """Return the fields of a Done that hold the token: none of them in a pull."""
    if token is None:
        return {}
    logprobs = None if token.logprobs is None else logprobs_to(token.logprobs)
    return {
        "first_token_id": token.token_id,
        "first_token_logprobs": logprobs,
        "draft_state": token.draft_state,
    }
