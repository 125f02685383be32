"""WebSocket endpoint of Responses: the requests of a connection are answered in turn."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.core.errors import NamedError
from baton.router.byte_budget import RETRY_AFTER_S
from baton.router.doors.openai.errors import OPENAI_ERRORS, RefusedByCode
from baton.router.doors.openai.request.bodies import with_session
from baton.router.doors.responses.store import ConnectionMemory, ResponseStore
from baton.router.doors.responses.turns import begin_turn
from baton.router.doors.responses.websocket.channel import (
    GOING_AWAY,
    INTERNAL_ERROR,
    NORMAL,
    ChannelEvents,
    MessageChannel,
    create_event_from,
    error_event,
    take_stream_id,
)
from baton.router.http.bodies import Bodies, ReceivedBody, run_until_first
from baton.router.http.errors import failure_of
from baton.router.http.exchange import ReceivedRequest, admitting
from baton.router.http.json_encoding import as_json
from baton.router.http.middleware import REQUEST_ID, SESSION_ID, request_id_of
from baton.router.input_processing.limits import check_name
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScope, RequestScopes
from baton.rpc.errors import ClientGone, Draining, QueueFull


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_age_s: float = 3600.0  # as OpenAI's
    max_pending: int = 16  # requests that wait for others of their connection
    max_streams: int = 32  # as OpenAI's


SESSION_LIMITS = SessionLimits()


@dataclass(frozen=True, slots=True)
class Services:
    """Services shared by all connections."""

    pipeline: Pipeline
    scopes: RequestScopes
    bodies: Bodies
    store: ResponseStore
    limits: SessionLimits = SESSION_LIMITS


@dataclass(slots=True)
class PendingRequest:
    """A request that has arrived, and holds its memory until it is answered."""

    id: str
    scope: RequestScope
    body: ReceivedBody
    held: AsyncExitStack
    headers: dict[str, str] = field(default_factory=dict)  # of an error


class Session:
    def __init__(
        self,
        services: Services,
        channel: MessageChannel,
        headers: Headers,
        request_id: str,
        owner: str,
        address: str = "",
    ) -> None:
        """`headers`, `request_id` and the host's `address` are those of the handshake."""
        self._services = services
        self._channel = channel
        self._headers = headers
        self._id = request_id
        self._address = address
        self._session_id = headers.get(SESSION_ID, "")
        self._num_requests = 0
        self._pending: asyncio.Queue[PendingRequest] = asyncio.Queue(services.limits.max_pending)
        self._memory = ConnectionMemory(services.store, owner)
        self._streams = set[str]()

    async def run(self) -> None:
        """Answer requests until the connection closes, which cancels those that run or wait."""
        try:
            await run_until_first(self._receive_all(), self._answer_all())
        finally:
            self._memory.close()
            while not self._pending.empty():
                await self._abandon(self._pending.get_nowait())

    async def _receive_all(self) -> None:
        """Receive at once what the client sends, since this detects that it disconnects."""
        while (message := await self._channel.receive()) is not None:
            self._num_requests += 1
            request_id = f"{self._id}.{self._num_requests}"
            try:
                self._pending.put_nowait(await self._hold(request_id, message))
            except NamedError as error:
                await self._send_error(error, {REQUEST_ID: request_id})
            await asyncio.sleep(0)  # many small messages can arrive at once

    async def _hold(self, request_id: str, message: bytes) -> PendingRequest:
        """Begin a request. Raises named errors."""
        scope = self._services.scopes.begin(
            request_id, self._headers.items(), address=self._address
        )
        async with AsyncExitStack() as held:
            with scope.ending_on_error():
                check_name(REQUEST_ID, request_id)
                hold = self._services.bodies.hold(message, scope.client)
                body = await held.enter_async_context(hold)
                if self._pending.full():
                    raise QueueFull(
                        f"{self._pending.maxsize} requests of this connection wait; send this one "
                        "after their responses, or over another connection",
                        RETRY_AFTER_S,
                    )
            return PendingRequest(request_id, scope, body, held.pop_all())

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._services.limits.max_age_s
        while loop.time() < deadline:
            try:
                async with asyncio.timeout_at(deadline):
                    request = await self._pending.get()
            except TimeoutError:
                break
            self._channel.note_answering(is_answering=True)
            async with request.held:
                await self._answer(request)
            self._channel.note_answering(is_answering=not self._pending.empty())
            if self._services.pipeline.is_draining:
                await self._channel.close(GOING_AWAY, "the router stops; connect again")
                return
        await self._end_by_age()

    async def _answer(self, request: PendingRequest) -> None:
        headers, stream_id = {REQUEST_ID: request.id}, ""
        try:
            with request.scope.ending_on_error():
                if request.scope.usage is not None:
                    request.held.enter_context(admitting(request.scope.usage, headers))
                event = await request.body.fields()
                stream_id = take_stream_id(event)
                self._check_stream(stream_id)
                create = create_event_from(event)
            turn = await begin_turn(
                self._services.pipeline,
                with_session(dict(create.fields), self._session_id),
                ReceivedRequest(request.id, self._session_id, request.body, request.scope),
                self._memory.of_stream(stream_id),
                is_warmup=create.is_warmup,
            )
            await turn.send(ChannelEvents(self._channel, stream_id))
        except NamedError as error:
            await self._send_error(error, headers, stream_id)

    def _check_stream(self, stream_id: str) -> None:
        """Raises InvalidRequest."""
        if not stream_id or stream_id in self._streams:
            return
        if len(self._streams) >= self._services.limits.max_streams:
            raise RefusedByCode(
                f"this connection has had {len(self._streams)} values of stream_id: use one of "
                "them, or another connection",
                "stream_id",
                "websocket_stream_limit_reached",
            )
        self._streams.add(stream_id)

    async def _end_by_age(self) -> None:
        minutes = self._services.limits.max_age_s / 60
        error = RefusedByCode(
            f"the connection has reached its limit of {minutes:g} minutes: connect again",
            None,
            "websocket_connection_limit_reached",
        )
        await self._send_error(error, {})
        await self._channel.close(NORMAL, "connect again")

    async def _send_error(
        self, error: NamedError, headers: dict[str, str], stream_id: str = ""
    ) -> None:
        await self._channel.send(as_json(error_event(failure_of(error), headers, stream_id)))

    async def _abandon(self, request: PendingRequest) -> None:
        with suppress(ClientGone):
            async with request.held:
                with request.scope.ending_on_error():
                    raise ClientGone("the client disconnected before its request was answered")


@dataclass(frozen=True, slots=True)
class WebSocketEndpoint:
    """ASGI app of one path."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check(headers)
        except NamedError as error:
            await OPENAI_ERRORS.response(failure_of(error))(scope, receive, send)
            return
        if (await receive())["type"] != "websocket.connect":
            return
        await send({"type": "websocket.accept"})
        channel = MessageChannel(scope, receive, send)
        owner = self.services.scopes.owner_of(headers.items())
        address, _ = scope.get("client") or ("", 0)
        session = Session(self.services, channel, headers, request_id_of(scope), owner, address)
        try:
            await session.run()
        except Exception:
            await channel.close(INTERNAL_ERROR, "internal error; see the server's log")
            raise

    def _check(self, headers: Headers) -> None:
        """Raises InvalidRequest and Draining."""
        for name in (REQUEST_ID, SESSION_ID):
            check_name(name, headers.get(name, ""))
        if self.services.pipeline.is_draining:
            raise Draining("the router stops; connect to another one, or try again in a second")
