"""Which node has which prefixes: what nodes tell of, and what was sent there. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from engine.hashing import BlockHash
from serving.prefixes import PrefixChanges, PrefixGap

# A node's expected blocks are forgotten beyond this many, the oldest first.
MAX_EXPECTED = 4096


class PrefixIndex:
    """Names of blocks by holder, and holders by name."""

    def __init__(self) -> None:
        self._holders_by_name: dict[BlockHash, set[str]] = {}
        self._names_by_holder: dict[str, OrderedDict[BlockHash, None]] = {}

    def names(self, holder: str) -> Iterable[BlockHash]:
        """Those it holds, the one that was added first before the others."""
        return self._names_by_holder.get(holder, OrderedDict()).keys()

    def add(self, holder: str, names: Iterable[BlockHash]) -> None:
        held = self._names_by_holder.setdefault(holder, OrderedDict())
        for name in names:
            held[name] = None
            self._holders_by_name.setdefault(name, set()).add(holder)

    def remove(self, holder: str, names: Iterable[BlockHash]) -> None:
        held = self._names_by_holder.get(holder, OrderedDict())
        for name in names:
            if name in held:
                del held[name]
                self._forget(holder, name)

    def drop(self, holder: str) -> None:
        """It holds nothing any more."""
        for name in self._names_by_holder.pop(holder, ()):
            self._forget(holder, name)

    def trim(self, holder: str, longest: int) -> None:
        held = self._names_by_holder.get(holder, OrderedDict())
        while len(held) > longest:
            name, _ = held.popitem(last=False)
            self._forget(holder, name)

    def num_names(self, holder: str) -> int:
        return len(self._names_by_holder.get(holder, ()))

    def match(self, names: Sequence[BlockHash]) -> dict[str, int]:
        """How many of the first names, without a gap, each holder has; none if not one."""
        matched: dict[str, int] = {}
        alive: set[str] | None = None
        for place, name in enumerate(names):
            holders = self._holders_by_name.get(name, set())
            still = holders if alive is None else alive & holders
            matched.update(dict.fromkeys((alive or set()) - still, place))
            alive = still
            if not alive:
                return matched
        matched.update(dict.fromkeys(alive or (), len(names)))
        return matched

    def _forget(self, holder: str, name: BlockHash) -> None:
        holders = self._holders_by_name[name]
        holders.discard(holder)
        if not holders:
            del self._holders_by_name[name]


class NodePrefixes:
    """What each node has, as it told, and what it is about to have.

    A node tells of a prompt's blocks when they are computed. Until then they are expected
    where the prompt was sent, or the next prompt of a burst would be sent elsewhere.
    """

    def __init__(self) -> None:
        self._told = PrefixIndex()
        self._expected = PrefixIndex()
        self._sequence_by_address: dict[str, int] = {}

    def take(self, address: str, changes: PrefixChanges) -> None:
        """Raises PrefixGap if changes before these were lost: ask for all there is."""
        if changes.is_snapshot:
            self.drop(address)
        elif changes.sequence != self._sequence_by_address.get(address, 0) + 1:
            raise PrefixGap(f"{address} told change {changes.sequence}, out of turn")
        self._sequence_by_address[address] = changes.sequence
        self._told.remove(address, changes.removed)
        self._told.add(address, changes.stored)
        self._expected.remove(address, (*changes.removed, *changes.stored))

    def expect(self, address: str, names: Iterable[BlockHash]) -> None:
        self._expected.add(address, names)
        self._expected.trim(address, MAX_EXPECTED)

    def expect_no_more(self, address: str, names: Iterable[BlockHash]) -> None:
        self._expected.remove(address, names)

    def drop(self, address: str) -> None:
        self._told.drop(address)
        self._expected.drop(address)
        self._sequence_by_address.pop(address, None)

    def num_told(self, address: str) -> int:
        """Cached blocks of this node."""
        return self._told.num_names(address)

    def told(self, names: Sequence[BlockHash]) -> dict[str, int]:
        """Leading blocks that each node has for sure."""
        return self._told.match(names)

    def likely(self, names: Sequence[BlockHash]) -> Mapping[str, int]:
        """Leading blocks that each node has or is about to have."""
        likely = self._told.match(names)
        for address, count in self._expected.match(names).items():
            likely[address] = max(count, likely.get(address, 0))
        return likely
