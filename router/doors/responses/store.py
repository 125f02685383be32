"""Stored responses, bounded by number, bytes and age. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


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
