"""Set of addresses to watch: those that a source lists or that are still reachable. Pure.

A reachable node that is no longer listed finishes its requests and gets no new ones: service names
drop a node that is shutting down or unhealthy long before it is gone.
"""

from __future__ import annotations

from baton.router.discovery.sources import NodeSource


class Membership:
    def __init__(self) -> None:
        self._listed_by_source: dict[NodeSource, frozenset[str]] = {}
        self._reachable: set[str] = set()

    def set_listed(self, source: NodeSource, addresses: frozenset[str]) -> None:
        """Set the addresses of a source. A source that fails keeps its last ones."""
        self._listed_by_source[source] = addresses

    def note_joined(self, address: str) -> None:
        self._reachable.add(address)

    def note_lost(self, address: str) -> None:
        self._reachable.discard(address)

    def is_reachable(self, address: str) -> bool:
        return address in self._reachable

    @property
    def listed(self) -> frozenset[str]:
        return frozenset().union(*self._listed_by_source.values())

    @property
    def watched(self) -> frozenset[str]:
        return self.listed | self._reachable

    @property
    def unlisted(self) -> frozenset[str]:
        """Addresses that are reachable but no longer listed."""
        return frozenset(self._reachable) - self.listed
