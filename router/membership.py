"""Which addresses to watch, from what the sources tell and from who is really there. Pure.

An address is watched as long as a source lists it, or the node behind it can still be reached.
A node that is there and not listed any more finishes what it has and gets nothing new: service
names drop a node that is on its way out or not well, well before it is gone.
"""

from __future__ import annotations

from router.node_sources import Member, NodeSource


class Membership:
    def __init__(self) -> None:
        self._listed_by_source: dict[NodeSource, frozenset[Member]] = {}
        self._there: set[Member] = set()

    def tell(self, source: NodeSource, members: frozenset[Member]) -> None:
        """A source has answered. One that cannot answer is not told of: what it said stands."""
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
        """Still there, but not to be given anything new."""
        return frozenset(self._there) - self.listed
