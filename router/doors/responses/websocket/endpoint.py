"""WebSocket endpoint of Responses: the handshake, and the life of a connection."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.core.errors import NamedError
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.responses.websocket.channel import INTERNAL_ERROR, MessageChannel
from baton.router.doors.responses.websocket.session import Services, Session
from baton.router.http.errors import failure_of
from baton.router.http.middleware import REQUEST_ID, SESSION_ID, request_id_of
from baton.router.input_processing.limits import check_name
from baton.rpc.errors import Draining


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
