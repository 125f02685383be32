"""Request bodies over HTTP: limits on bytes and JSON values, parsing, detection of disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from baton.router.byte_budget import ByteBudget, Lease
from baton.router.input_processing.limits import MAX_ANSWERS
from baton.router.input_processing.tokenization import LargeTextConfig, LargeTexts
from baton.router.routing.node_table import NodeTable
from baton.rpc.errors import BodyTimeout, ClientGone, MessageTooLarge, Unreadable

MAX_BODY_BYTES = 16 << 20
# A body up to this size is not counted in the budget: the number of connections bounds it.
SMALL_BODY_BYTES = 1 << 16
# JSON values per body, for all fields other than prompts, and in total.
MAX_OTHER_VALUES = 1 << 16
MAX_VALUES = 1 << 20
# Cost of parsing an object, a list or a key, in units of one number.
NUM_VALUES_BY_MARK = {b",": 1, b"[": 4, b"{": 4, b":": 3}
VALUE_BYTES = 32  # approximate memory of a parsed JSON value
BODY_TIMEOUT_S = 60.0
PRODUCTS_PER_BYTE = 64  # computed in the time in which a byte of JSON is parsed
# A single thread: each additional one would delay the event loop further, because of the GIL.
ONE_AT_A_TIME = LargeTextConfig(small_size=SMALL_BODY_BYTES, num_threads=1)

STRUCTURE = b'",:[{'
NO_STRUCTURE = bytes(set(range(256)) - set(STRUCTURE))

Result = TypeVar("Result")


@dataclass(slots=True)
class ReceivedBody:
    raw: bytes
    thread: LargeTexts  # for large bodies
    lease: Lease
    client: str = ""  # name of `turn_name`: whose turn it is on the thread
    num_more_bytes: int = 0  # of what was read from the body, such as the texts of files

    @property
    def size(self) -> int:
        return len(self.raw) + self.num_more_bytes

    def hold_more(self, num_bytes: int) -> None:
        """Count what was read from the body in the budget, too. Raises QueueFull."""
        self.lease.add(num_bytes)
        self.num_more_bytes += num_bytes

    async def hold_json(self, value: bytes) -> None:
        """Count JSON that is parsed together with the body as a body. Raises QueueFull."""
        work = partial(_parsed_size, value)
        num_bytes = await self.thread.run(len(value), work, self.client)
        if len(value) > SMALL_BODY_BYTES:
            self.hold_more(num_bytes)
        else:
            self.num_more_bytes += num_bytes

    async def fields(self) -> dict[str, Any]:
        """Parse the body. Raises Unreadable, and QueueFull if too many bodies wait to be parsed."""
        return await self.run(partial(json_object, self.raw))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work`, whose time grows with the body. Raises what `work` raises, and QueueFull."""
        return await self.thread.run(self.size, work, self.client)

    async def compute(self, num_products: int, work: Callable[[], Result]) -> Result:
        """Run `work`, which multiplies so many numbers. Raises QueueFull."""
        return await self.thread.run(num_products // PRODUCTS_PER_BYTE, work, self.client)


class Bodies:
    """Receives bodies, within the limits of the router."""

    def __init__(self, table: NodeTable, budget: ByteBudget) -> None:
        self._table = table
        self._budget = budget
        self._thread = LargeTexts(ONE_AT_A_TIME)

    @asynccontextmanager
    async def receive(self, request: Request, client: str = "") -> AsyncIterator[ReceivedBody]:
        """Yield the body, which counts in the budget until the block ends.

        Raises MessageTooLarge, QueueFull, BodyTimeout and ClientGone.
        """
        with self._budget.lease() as lease:
            raw = await read_body(request, lease, self._gauge())
            yield ReceivedBody(raw, self._thread, lease, client)

    @asynccontextmanager
    async def hold(self, message: bytes, client: str) -> AsyncIterator[ReceivedBody]:
        """Yield a body that has arrived as one message, and counts in the budget.

        Raises MessageTooLarge and QueueFull.
        """
        gauge = self._gauge()
        with self._budget.lease() as lease:
            for start in range(0, len(message), SMALL_BODY_BYTES):
                gauge.feed(message[start : start + SMALL_BODY_BYTES])
                await asyncio.sleep(0)
            lease.grow_to(len(message) + VALUE_BYTES * gauge.num_values)
            yield ReceivedBody(message, self._thread, lease, client)

    def _gauge(self) -> JsonGauge:
        return JsonGauge(max_values(self._table.served_model().max_model_len))


class JsonGauge:
    """Counts JSON values of a body that arrives in pieces, without parsing it."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._is_in_string = False
        self._trailing_backslash = b""  # a backslash whose next character has not arrived
        self.num_values = 1

    def feed(self, piece: bytes) -> None:
        """Raises MessageTooLarge."""
        # Escapes hide quotes. Pairs of backslashes go first, from the left, as JSON reads them.
        plain = (self._trailing_backslash + piece).replace(rb"\\", b"")
        self._trailing_backslash = b"\\" if plain.endswith(b"\\") else b""
        marks = plain.replace(rb"\"", b"").translate(None, NO_STRUCTURE)
        parts = marks.split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        for mark, num_values in NUM_VALUES_BY_MARK.items():
            self.num_values += num_values * outside.count(mark)
        self._is_in_string ^= len(parts) % 2 == 0
        if self.num_values > self._max_values:
            raise MessageTooLarge(
                f"the body has more than {self._max_values} JSON values, token ids included; send "
                "shorter lists, or fewer prompts at once"
            )


def _parsed_size(body: bytes) -> int:
    """Return the approximate memory of a body and its values."""
    gauge = JsonGauge(max_values=len(body) * max(NUM_VALUES_BY_MARK.values()) + 1)
    for start in range(0, len(body), SMALL_BODY_BYTES):
        gauge.feed(body[start : start + SMALL_BODY_BYTES])
    return len(body) + VALUE_BYTES * gauge.num_values


def max_values(max_model_len: int | None) -> int:
    """Return the limit of JSON values: prompts of token ids, and all other fields."""
    if max_model_len is None:
        return MAX_VALUES
    return min(MAX_VALUES, MAX_OTHER_VALUES + MAX_ANSWERS * max_model_len)


async def read_body(
    request: Request, lease: Lease, gauge: JsonGauge, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Raises MessageTooLarge, QueueFull, BodyTimeout, and ClientGone if the client disconnects."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise MessageTooLarge(
                        f"the body has more than {MAX_BODY_BYTES >> 20} MiB; send a shorter prompt"
                    )
                gauge.feed(piece)
                if len(body) > SMALL_BODY_BYTES:
                    lease.grow_to(len(body) + VALUE_BYTES * gauge.num_values)
    except TimeoutError:
        raise BodyTimeout(
            f"{len(body)} bytes of the body came within {timeout_s:g} s, but not the rest; "
            "send it faster"
        ) from None
    except ClientDisconnect as error:
        raise ClientGone("the client disconnected before its request was complete") from error
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a body and drop fields that are null. Raises Unreadable."""
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Unreadable(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Unreadable("the body must be a JSON object")
    return {name: value for name, value in parsed.items() if value is not None}


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, object]) -> None:
    """Run `work`, and cancel it when the client disconnects, so that the nodes stop, too."""
    await run_until_first(work, _wait_for_disconnect(receive))


async def result_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, which is cancelled when the client disconnects.

    Raises ClientGone then.
    """
    results: list[Result] = []

    async def add_result() -> None:
        results.append(await work)

    await run_while_connected(receive, add_result())
    if not results:
        raise ClientGone("the client disconnected before its request was answered")
    return results[0]


async def run_until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Run all until the first one ends, and cancel the others. Raises what they raise."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        """Ignore anything else that follows the body."""
