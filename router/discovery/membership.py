"""Set of addresses to watch: those that a source lists or that are still reachable. Pure.

A reachable node that is no longer listed finishes its requests and gets no new ones: service names
drop a node that is shutting down or unhealthy long before it is gone.
"""

from __future__ import annotations

from baton.router.discovery.sources import Member, NodeSource


class Membership:
    def __init__(self) -> None:
        self._listed_by_source: dict[NodeSource, frozenset[Member]] = {}
        self._reachable: set[Member] = set()

    def set_listed(self, source: NodeSource, members: frozenset[Member]) -> None:
        """Set the members of a source. A source that fails keeps its last members."""
        self._listed_by_source[source] = members

    def note_joined(self, member: Member) -> None:
        self._reachable.add(member)

    def note_lost(self, member: Member) -> None:
        self._reachable.discard(member)

    def is_reachable(self, member: Member) -> bool:
        return member in self._reachable

    @property
    def listed(self) -> frozenset[Member]:
        return frozenset().union(*self._listed_by_source.values())

    @property
    def watched(self) -> frozenset[Member]:
        return self.listed | self._reachable

    @property
    def unlisted(self) -> frozenset[Member]:
        """Members that are reachable but no longer listed."""
        return frozenset(self._reachable) - self.listed
