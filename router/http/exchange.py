"""One exchange over HTTP: a request that generates, and its response or stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from baton.core.errors import NamedError
from baton.router.admission.rate_limits import ClientUsage
from baton.router.fair_slots import turn_name
from baton.router.http.bodies import Bodies, ReceivedBody, run_while_connected
from baton.router.http.errors import ErrorFormat, failure_of
from baton.router.http.middleware import (
    REQUEST_ID,
    SESSION_ID,
    TRACE_ID,
    request_id_of,
)
from baton.router.input_processing.limits import check_name
from baton.router.request_scope import RequestScope, RequestScopes

JSON_HEADERS = {"content-type": "application/json"}
# Proxies must not buffer events.
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request whose body has arrived."""

    id: str
    session_id: str  # of the header; empty: not given
    body: ReceivedBody
    scope: RequestScope


@dataclass(slots=True, eq=False)
class Reply:
    """Sends one response. Before its first byte, a failure is sent with its own HTTP status."""

    scope: Scope
    receive: Receive
    send: Send
    errors: ErrorFormat
    headers: dict[str, str]
    _has_begun: bool = field(default=False, init=False)

    async def send_body(self, body: Sequence[bytes]) -> None:
        """Send a whole body, given in slices."""
        num_bytes = sum(map(len, body))
        await self._begin({**JSON_HEADERS, "content-length": str(num_bytes)})
        for number, piece in enumerate(body, 1):
            await self._write(piece, is_last=number == len(body))

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            await self._begin(EVENT_HEADERS)
        if events:
            await self._write(events, is_last=is_last)

    async def send_error(self, error: NamedError) -> None:
        failure = failure_of(error)
        if self._has_begun:
            await self._write(self.errors.event(failure), is_last=True)
            return
        respond = self.errors.response(failure, self.headers)
        await respond(self.scope, self.receive, self.send)

    async def _begin(self, headers: dict[str, str]) -> None:
        self._has_begun = True
        everything = {**self.headers, **headers}
        raw = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in everything.items()
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, body: bytes, *, is_last: bool) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})


# Answers a request. Raises named errors, before or after the first event.
Answer = Callable[[ReceivedRequest, Reply], Awaitable[None]]


@asynccontextmanager
async def receiving(
    request: Request, scopes: RequestScopes, bodies: Bodies
) -> AsyncIterator[ReceivedBody]:
    """Yield the body of a request that generates nothing, and counts in the client's limits.

    Raises RateLimited, and what `Bodies.receive` raises.
    """
    owner = scopes.owner_of(request.headers.items())
    with scopes.admitting(owner):
        async with bodies.receive(request, turn_name(owner, host_of(request))) as received:
            yield received


def host_of(request: Request) -> str:
    """Return the host that calls; empty if it is not known."""
    return "" if request.client is None else request.client.host


@dataclass(frozen=True, slots=True, eq=False)
class GenerationEndpoint:
    """ASGI app of one path. A request is one task, cancelled when its client disconnects."""

    scopes: RequestScopes
    bodies: Bodies
    errors: ErrorFormat
    answer: Answer
    id_header: str = REQUEST_ID  # a further header of responses for the request's id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client_request_id = request.headers.get(REQUEST_ID, "")
        request_id = request_id_of(scope)
        request_scope = self.scopes.begin(
            request_id, request.headers.items(), address=host_of(request)
        )
        trace_id = request_scope.trace_id
        ids = {REQUEST_ID: request_id, self.id_header: request_id, TRACE_ID: trace_id}
        headers = {name: value for name, value in ids.items() if value}
        reply = Reply(scope, receive, send, self.errors, headers)
        async with AsyncExitStack() as receiving:
            try:
                with request_scope.ending_on_error():
                    check_name(REQUEST_ID, client_request_id)
                    session_id = request.headers.get(SESSION_ID, "")
                    check_name(SESSION_ID, session_id)
                    if request_scope.usage is not None:
                        receiving.enter_context(admitting(request_scope.usage, headers))
                    body = await receiving.enter_async_context(
                        self.bodies.receive(request, request_scope.client)
                    )
            except NamedError as error:
                await reply.send_error(error)
                return
            received = ReceivedRequest(request_id, session_id, body, request_scope)
            await run_while_connected(receive, self._serve(received, reply))

    async def _serve(self, request: ReceivedRequest, reply: Reply) -> None:
        try:
            await self.answer(request, reply)
        except NamedError as error:
            await reply.send_error(error)


@contextmanager
def admitting(usage: ClientUsage, headers: MutableMapping[str, str]) -> Iterator[None]:
    """Count a request until the end of the block, and add the client's limits to its headers.

    Raises RateLimited.
    """
    try:
        with usage.admitting():
            headers.update(limit_headers(usage))
            yield
    except BaseException:
        headers.update(limit_headers(usage))
        raise


def limit_headers(usage: ClientUsage) -> dict[str, str]:
    """Return the headers that report rate limits to clients, as OpenAI names them."""
    found: dict[str, str] = {}
    for name, allowance in usage.allowances().items():
        found[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
        found[f"x-ratelimit-reset-{name}"] = duration(allowance.reset_s)
    return found


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `120ms`, `6.5s`, `1m30s`."""
    ms = round(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, MINUTE_MS)
    rest = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
