"""Slots of an acceptor's connections, and limits on their clients."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Protocol

from baton.router.byte_budget import MAX_BYTES_IN_FLIGHT


class OpenConnection(Protocol):
    @property
    def is_open(self) -> bool: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limit of connections, and timeouts of clients."""

    max_connections: int = 4096
    handshake_s: float = 10.0  # for the TLS handshake
    # From the start of a connection, or the first byte of a request, to the end of its headers.
    head_s: float = 20.0
    body_s: float = 30.0  # between two chunks of a body
    unread_s: float = 120.0  # while a client does not read its answer, or answer a ping
    message_s: float = 60.0  # from the first byte of a WebSocket message to its last
    ping_s: float = 30.0  # between pings over WebSocket
    close_s: float = 10.0  # for the answer to the end of a WebSocket
    max_arriving_bytes: int = MAX_BYTES_IN_FLIGHT  # of large WebSocket messages, all together


class ConnectionSlot:
    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.opening: asyncio.Task[None] | None = None  # includes the TLS handshake
        self.http: OpenConnection | None = None

    def abort(self) -> None:
        if self.http is not None and self.http.is_open:
            self.http.abort()
            return
        if self.opening is not None:
            self.opening.cancel()
        if self.http is None:  # no transport owns the socket yet
            self.socket.close()


class ConnectionSlots:
    """Slots of an acceptor's connections. Waiting connections are ordered by their waiting time."""

    def __init__(self) -> None:
        self._taken: set[ConnectionSlot] = set()
        self._waiting: dict[ConnectionSlot, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, accepted: socket.socket) -> ConnectionSlot:
        slot = ConnectionSlot(accepted)
        self._taken.add(slot)
        self._waiting[slot] = None
        return slot

    def note_waiting(self, slot: ConnectionSlot) -> None:
        """Record that the connection waits for its client, from now on."""
        if slot in self._taken:
            self._waiting.pop(slot, None)
            self._waiting[slot] = None

    def note_answering(self, slot: ConnectionSlot) -> None:
        """Record that the connection answers a complete request."""
        self._waiting.pop(slot, None)

    def free(self, slot: ConnectionSlot) -> None:
        self._taken.discard(slot)
        self._waiting.pop(slot, None)

    def opening(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the connections that are not open yet."""
        tasks = [slot.opening for slot in self._taken]
        return [task for task in tasks if task is not None and not task.done()]

    def close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest. Return False if none waits."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self.free(longest)
        longest.abort()
        return True
