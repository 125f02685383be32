"""Index of the prefix blocks on each node, reported and expected. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from baton.engine.kv_cache.block_hashes import BlockHash
from baton.router.routing.holder_table import HolderTable, keys_of
from baton.rpc.cached_prefixes import PrefixChanges, PrefixGap

# Limit of expected blocks per node; the oldest are dropped first.
MAX_EXPECTED = 4096


class ExpectedPrefixes:
    """Bidirectional index of the few block names that nodes are about to have."""

    def __init__(self) -> None:
        self._holders_by_name: defaultdict[BlockHash, set[str]] = defaultdict(set)
        self._names_by_holder: dict[str, OrderedDict[BlockHash, None]] = {}

    def add(self, holder: str, names: Iterable[BlockHash]) -> None:
        held = self._names_by_holder.setdefault(holder, OrderedDict())
        for name in names:
            held[name] = None
            self._holders_by_name[name].add(holder)
        oldest = [held.popitem(last=False)[0] for _ in range(len(held) - MAX_EXPECTED)]
        self._forget(holder, oldest)

    def remove(self, holder: str, names: Iterable[BlockHash]) -> None:
        held = self._names_by_holder.get(holder, OrderedDict())
        removed = held.keys() & names
        for name in removed:
            del held[name]
        self._forget(holder, removed)

    def remove_reported(self, holder: str, changes: PrefixChanges) -> None:
        """Remove the names whose arrival or removal a node has reported."""
        held = list(self._names_by_holder.get(holder, ()))
        if held:
            keys = keys_of(changes.stored + changes.removed)
            are_reported = np.isin(keys_of(held), keys)
            self.remove(holder, [held[position] for position in np.flatnonzero(are_reported)])

    def drop(self, holder: str) -> None:
        self._forget(holder, self._names_by_holder.pop(holder, ()))

    def match(self, names: Sequence[BlockHash]) -> dict[str, int]:
        """Return for each holder how many of the leading names it has without a gap, if any."""
        matched: dict[str, int] = {}
        matching: set[str] | None = None
        for position, name in enumerate(names):
            holders = self._holders_by_name.get(name, set())
            remaining = holders if matching is None else matching & holders
            matched.update(dict.fromkeys((matching or set()) - remaining, position))
            matching = remaining
            if not matching:
                return matched
        matched.update(dict.fromkeys(matching or (), len(names)))
        return matched

    def match_ends(self, names: Sequence[BlockHash]) -> dict[str, int]:
        """Return for each holder the number of names up to the last one that it has, if any."""
        matched: dict[str, int] = {}
        for position, name in enumerate(names):
            matched.update(dict.fromkeys(self._holders_by_name.get(name, ()), position + 1))
        return matched

    def _forget(self, holder: str, names: Iterable[BlockHash]) -> None:
        for name in names:
            holders = self._holders_by_name[name]
            holders.discard(holder)
            if not holders:
                del self._holders_by_name[name]


class PrefixMatch(NamedTuple):
    """Number of leading blocks of a prompt by node, without the nodes that have none."""

    reported: Mapping[str, int]  # that the node has reported
    expected: Mapping[str, int]  # that it has or is about to have


class NodePrefixes:
    """Prefix blocks of all nodes: those they have reported, and those they are about to have.

    A node reports the blocks of a prompt once they are computed. Until then they are expected on
    the node to which the prompt was sent, so that the following prompts of a burst go there too.
    """

    def __init__(self) -> None:
        self._reported = HolderTable()
        self._expected = ExpectedPrefixes()
        self._sequence_by_address: dict[str, int] = {}

    def take(self, address: str, changes: PrefixChanges) -> None:
        """Apply reported changes. Raises PrefixGap if earlier ones were lost: watch again."""
        if changes.is_snapshot:
            self.drop(address)
        elif changes.sequence != self._sequence_by_address.get(address, 0) + 1:
            raise PrefixGap(f"{address} sent prefix change {changes.sequence} out of order")
        self._sequence_by_address[address] = changes.sequence
        self._reported.remove(address, keys_of(changes.removed))
        self._reported.add(address, keys_of(changes.stored))
        self._expected.remove_reported(address, changes)

    def expect(self, address: str, names: Iterable[BlockHash]) -> None:
        self._expected.add(address, names)

    def cancel_expected(self, address: str, names: Iterable[BlockHash]) -> None:
        self._expected.remove(address, names)

    def drop(self, address: str) -> None:
        self._reported.drop(address)
        self._expected.drop(address)
        self._sequence_by_address.pop(address, None)

    def num_reported(self, address: str) -> int:
        return self._reported.num_names(address)

    @property
    def num_reported_bytes(self) -> int:
        return self._reported.num_bytes

    def match(self, names: Sequence[BlockHash], *, needs_snapshot: bool = False) -> PrefixMatch:
        """Match the leading blocks of a prompt with those of all nodes.

        With `needs_snapshot`, a node's hit ends at the last block that it has reported.
        """
        keys = keys_of(names)
        if needs_snapshot:
            reported = self._reported.match_ends(keys)
            about_to_have = self._expected.match_ends(names)
        else:
            reported = self._reported.match(keys)
            about_to_have = self._expected.match(names)
        expected = dict(reported)
        for address, count in about_to_have.items():
            expected[address] = max(count, expected.get(address, 0))
        return PrefixMatch(reported, expected)
