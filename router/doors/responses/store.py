"""Stored responses of tenants, bounded by number, bytes and age. Pure."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton.core.errors import NamedError
from baton.router.doors.openai.errors import RefusedByCode
from baton.router.doors.responses.parsed_response import NO_HISTORY

ID_BYTES = 12
GONE = "it is unknown, expired or deleted, or another router has it"


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_responses: int = 1024  # of one tenant
    max_bytes: int = 32 << 20  # of one tenant
    max_total_bytes: int = 256 << 20
    max_age_s: float = 86_400.0


class StoredResponse(NamedTuple):
    body: bytes  # JSON of the response
    history: bytes  # JSON of all items of the conversation, those of the answer included
    stored_s: float
    connection: str = ""  # that alone can continue the response; empty: the tenant can

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.history)


class Shelf:
    """Responses of one tenant, oldest first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.responses[response_id] = response
        self.num_bytes += response.num_bytes

    def drop(self, response_id: str) -> int:
        """Return the number of bytes that this frees."""
        num_bytes = self.responses.pop(response_id).num_bytes
        self.num_bytes -= num_bytes
        return num_bytes


class ResponseStore:
    """Responses by tenant and id. A tenant cannot read, delete or evict those of another one.

    Only where all tenants together exceed the limit, the oldest of all are evicted.
    """

    def __init__(self, limits: StoreLimits = StoreLimits()) -> None:
        self._limits = limits
        self._shelves: dict[str, Shelf] = {}
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()  # oldest first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Store a response under a new id. Return False if it is too large."""
        if response.num_bytes > self._limits.max_bytes:
            return False
        self._expire(response.stored_s)
        shelf = self._shelves.setdefault(tenant, Shelf())
        while shelf.responses and self._is_full(shelf, response.num_bytes):
            self._drop(tenant, next(iter(shelf.responses)))
        while self._order and self.num_bytes + response.num_bytes > self._limits.max_total_bytes:
            self._drop(*next(iter(self._order)))
        self._shelves.setdefault(tenant, shelf).put(response_id, response)
        self._order[tenant, response_id] = None
        self.num_bytes += response.num_bytes
        return True

    def find(
        self, tenant: str, response_id: str, now: float, connection: str = ""
    ) -> StoredResponse | None:
        """Return the response, if the connection can see it; empty: no connection of its own."""
        self._expire(now)
        shelf = self._shelves.get(tenant)
        found = None if shelf is None else shelf.responses.get(response_id)
        return found if found is not None and found.connection in ("", connection) else None

    def delete(self, tenant: str, response_id: str, now: float, connection: str = "") -> bool:
        """Return whether there was such a response."""
        if self.find(tenant, response_id, now, connection) is None:
            return False
        self._drop(tenant, response_id)
        return True

    def _is_full(self, shelf: Shelf, num_more: int) -> bool:
        has_most = len(shelf.responses) >= self._limits.max_responses
        return has_most or shelf.num_bytes + num_more > self._limits.max_bytes

    def _expire(self, now: float) -> None:
        while self._order:
            tenant, response_id = next(iter(self._order))
            stored_s = self._shelves[tenant].responses[response_id].stored_s
            if now - stored_s < self._limits.max_age_s:
                return
            self._drop(tenant, response_id)

    def _drop(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        self.num_bytes -= shelf.drop(response_id)
        del self._order[tenant, response_id]
        if not shelf.responses:
            del self._shelves[tenant]


@dataclass(frozen=True, slots=True)
class TenantMemory:
    """Stored responses of a tenant."""

    store: ResponseStore
    tenant: str
    connection: str = ""

    def history(self, previous: object) -> bytes:
        """Return the items before a request. Raises InvalidRequest."""
        if not isinstance(previous, str):
            return NO_HISTORY
        found = self.store.find(self.tenant, previous, time.monotonic(), self.connection)
        if found is None:
            raise RefusedByCode(
                f"previous_response_id {previous[:64]!r} was not found: {GONE}; send the whole "
                "conversation as input",
                "previous_response_id",
                "previous_response_not_found",
            )
        return found.history

    def keeps(self, *, is_stored: bool) -> bool:
        """Return whether anything of a response is kept that is stored, or is not."""
        return is_stored

    def keep(self, response_id: str, body: bytes, history: bytes, *, is_stored: bool) -> bool:
        """Keep a response. Return False if it is too large."""
        response = StoredResponse(body, history, time.monotonic())
        return not is_stored or self.store.put(self.tenant, response_id, response)

    @contextmanager
    def forgetting_on_error(self, previous: object) -> Iterator[None]:
        """Forget the previous response if it cannot be continued, unless it is stored."""
        try:
            yield
        except NamedError:
            self._forget(previous)
            raise

    def _forget(self, previous: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ConnectionMemory(TenantMemory):
    """Stored responses of a tenant, and the last one of each stream of a connection.

    The latter counts in the limits of the tenant, too. It is dropped with the connection.
    """

    connection: str = field(default_factory=lambda: secrets.token_hex(ID_BYTES))
    stream_id: str = ""
    last: dict[str, str] = field(default_factory=dict)  # ids by stream, of what is not stored

    def of_stream(self, stream_id: str) -> ConnectionMemory:
        return replace(self, stream_id=stream_id)

    def keeps(self, *, is_stored: bool) -> bool:
        return True

    def keep(self, response_id: str, body: bytes, history: bytes, *, is_stored: bool) -> bool:
        if is_stored:
            return TenantMemory.keep(self, response_id, body, history, is_stored=True)
        self._drop(self.stream_id)
        response = StoredResponse(b"", history, time.monotonic(), self.connection)
        if not self.store.put(self.tenant, response_id, response):
            return False
        self.last[self.stream_id] = response_id
        return True

    def _forget(self, previous: object) -> None:
        for stream_id, response_id in list(self.last.items()):
            if response_id == previous:
                self._drop(stream_id)

    def close(self) -> None:
        for stream_id in list(self.last):
            self._drop(stream_id)

    def _drop(self, stream_id: str) -> None:
        response_id = self.last.pop(stream_id, None)
        if response_id is not None:
            self.store.delete(self.tenant, response_id, time.monotonic(), self.connection)
