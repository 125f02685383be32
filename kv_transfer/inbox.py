"""What other threads than the engine's may do to a worker half: post letters, give signs of life.

A peer must not take a node in a long pass for a dead one, so those who bring its letters answer
what asks for no more than that, for as long as the engine's thread has been seen lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kv_transfer.config import KvWorkerConfig
from kv_transfer.link import Link, LinkId
from kv_transfer.messages import LinkMessage, Renew, Renewed


class Inbox:
    def __init__(self, link: Link, config: KvWorkerConfig, clock: Callable[[], float]) -> None:
        self._link = link
        self._busy_s = config.busy_s
        self._pulse_after_s = config.receiver.renew_every_s
        self._clock = clock
        self._letters: deque[tuple[LinkId, LinkMessage | str]] = deque()
        self._looked_s = clock()
        self._renewals: tuple[tuple[LinkId, Renew], ...] = ()

    # --- Any thread ------------------------------------------------------------------------

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        self._letters.append((link_id, message))
        if isinstance(message, Renew) and self._away_s() < self._busy_s:
            self._link.send(link_id, Renewed(message.handoff_ids))

    def lost(self, link_id: LinkId, reason: str) -> None:
        self._letters.append((link_id, reason))

    def pulse(self) -> None:
        if self._pulse_after_s <= self._away_s() < self._busy_s:
            for link_id, renew in self._renewals:
                self._link.send(link_id, renew)

    def _away_s(self) -> float:
        """For how long the engine's thread has not come by."""
        return self._clock() - self._looked_s

    # --- The engine's thread ---------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._letters)

    def take(self) -> Iterator[tuple[LinkId, LinkMessage | str]]:
        """Messages, and of links that are lost the reason. The engine's thread is seen here."""
        self._looked_s = self._clock()
        while self._letters:
            yield self._letters.popleft()

    def speak(self, renewals: tuple[tuple[LinkId, Renew], ...]) -> None:
        """What to say while the engine's thread is away."""
        self._renewals = renewals
