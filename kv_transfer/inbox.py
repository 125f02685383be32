"""Thread-safe inbox of the KV worker: queues control messages and sends keep-alives.

A peer must not mistake a node in a long forward pass for a dead one. The link's threads therefore
send keep-alives themselves, as long as the engine thread has been active within `busy_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.link import Link, LinkId
from baton.kv_transfer.protocol.messages import LinkMessage, Renew, Renewed


class Inbox:
    """Implements LinkEvents."""

    def __init__(self, link: Link, config: KvWorkerConfig, clock: Callable[[], float]) -> None:
        self._link = link
        self._busy_s = config.busy_s
        self._pulse_after_s = config.receiver.renew_every_s
        self._clock = clock
        self._messages: deque[tuple[LinkId, LinkMessage | str]] = deque()
        self._last_active_s = clock()
        self._keep_alives: tuple[tuple[LinkId, Renew], ...] = ()

    # --- Any thread ------------------------------------------------------------------------

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        self._messages.append((link_id, message))
        if isinstance(message, Renew) and self._inactive_s() < self._busy_s:
            self._link.send(link_id, Renewed(message.handoff_ids))

    def lost(self, link_id: LinkId, reason: str) -> None:
        self._messages.append((link_id, reason))

    def pulse(self) -> None:
        if self._pulse_after_s <= self._inactive_s() < self._busy_s:
            for link_id, renew in self._keep_alives:
                self._link.send(link_id, renew)

    def _inactive_s(self) -> float:
        """Time since the engine thread last emptied the inbox."""
        return self._clock() - self._last_active_s

    # --- The engine thread -----------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._messages)

    def take(self) -> Iterator[tuple[LinkId, LinkMessage | str]]:
        """Yield the queued messages; a lost link yields its reason. Marks the thread as active."""
        self._last_active_s = self._clock()
        while self._messages:
            yield self._messages.popleft()

    def set_keep_alives(self, keep_alives: tuple[tuple[LinkId, Renew], ...]) -> None:
        """Set the messages that `pulse` sends while the engine thread is in a long pass."""
        self._keep_alives = keep_alives
