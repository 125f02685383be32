"""Set of addresses to watch: those that a source lists or that are still reachable. Pure.

A reachable node that is no longer listed finishes its requests and gets no new ones: service names
drop a node that is shutting down or unhealthy long before it is gone.
"""

from __future__ import annotations

from baton.router.discovery.sources import Member, NodeSource


class Membership:
    def __init__(self) -> None:
        self._listed_by_source: dict[NodeSource, frozenset[Member]] = {}
        self._there: set[Member] = set()

    def tell(self, source: NodeSource, members: frozenset[Member]) -> None:
        """Set the members of a source. A source that fails keeps its last members."""
        self._listed_by_source[source] = members

    def joined(self, member: Member) -> None:
        self._there.add(member)

    def lost(self, member: Member) -> None:
        self._there.discard(member)

    def is_there(self, member: Member) -> bool:
        return member in self._there

    @property
    def listed(self) -> frozenset[Member]:
        return frozenset().union(*self._listed_by_source.values())

    @property
    def watched(self) -> frozenset[Member]:
        return self.listed | self._there

    @property
    def unlisted(self) -> frozenset[Member]:
        """Members that are reachable but no longer listed."""
        return frozenset(self._there) - self.listed
