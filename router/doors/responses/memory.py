"""Responses that a client can continue by `previous_response_id`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from baton.core.errors import NamedError
from baton.router.doors.openai.errors import RefusedByCode
from baton.router.doors.responses.parsed_response import NO_HISTORY
from baton.router.doors.responses.store import ResponseStore, StoredResponse

ID_BYTES = 12
GONE = "it is unknown, expired or deleted, or another router has it"


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
