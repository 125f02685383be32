"""Names of cached blocks and the nodes that hold them, for hundreds of nodes. Pure.

Two names can have the same key, with the odds that `key_table` states. Then a match can be too
long, which costs a worse choice of nodes, but no wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.router.routing.holder_sets import HolderSets
from baton.router.routing.key_table import Flags, Keys, KeyTable, as_keys

MAX_BATCH = 4096  # names that are taken in at once
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # spreads the bits of a name


class HolderTable:
    """Block names and their holders."""

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._set_by_key = KeyTable(self._keep, lambda: self._sets.num_held)
        self._number_by_holder: dict[str, int] = {}
        self._holders: list[str | None] = []  # by number; None: free
        self._num_names: list[int] = []  # by number

    @property
    def num_bytes(self) -> int:
        return self._set_by_key.num_bytes + self._sets.num_bytes

    def num_names(self, holder: str) -> int:
        number = self._number_by_holder.get(holder)
        return 0 if number is None else self._num_names[number]

    def add(self, holder: str, keys: Keys) -> None:
        self._change(holder, keys, is_holder=True)

    def remove(self, holder: str, keys: Keys) -> None:
        if holder in self._number_by_holder:
            self._change(holder, keys, is_holder=False)

    def drop(self, holder: str) -> None:
        number = self._number_by_holder.pop(holder, None)
        if number is not None:
            self._sets.drop(number)
            self._holders[number] = None
            self._num_names[number] = 0

    def match(self, keys: Keys) -> dict[str, int]:
        """Return for each holder how many of the leading names it has without a gap, if any."""
        return self._counts(np.bitwise_and.accumulate(self._holder_bits(keys), axis=0))

    def match_ends(self, keys: Keys) -> dict[str, int]:
        """Return for each holder the number of names up to the last one that it has, if any."""
        return self._counts(np.bitwise_or.accumulate(self._holder_bits(keys)[::-1], axis=0))

    def _change(self, holder: str, keys: Keys, *, is_holder: bool) -> None:
        number = self._number(holder)
        for first in range(0, len(keys), MAX_BATCH):
            found = self._set_by_key.look_up(_unique(keys[first : first + MAX_BATCH]))
            found = found.only(self._sets.have(found.numbers, number) != is_holder)
            self._set_by_key.put(found, self._sets.toggle(found.numbers, number))
            num_changes = len(found.keys)
            self._num_names[number] += num_changes if is_holder else -num_changes

    def _number(self, holder: str) -> int:
        number = self._number_by_holder.get(holder)
        if number is None:
            if None not in self._holders:
                self._holders.append(None)
                self._num_names.append(0)
            number = self._number_by_holder[holder] = self._holders.index(None)
            self._holders[number] = holder
            self._sets.make_room_for(number)
        return number

    def _holder_bits(self, keys: Keys) -> npt.NDArray[np.uint64]:
        return self._sets.bits(self._set_by_key.get(keys))

    def _counts(self, rows: npt.NDArray[np.uint64]) -> dict[str, int]:
        """Return how many of the rows have the bit of each holder."""
        if not len(rows):
            return {}
        used = max(1, -(-len(self._holders) // 64))
        rows = np.ascontiguousarray(rows[:, :used])
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
        counts = bits.sum(axis=0, dtype=np.uint32)
        numbers = np.flatnonzero(counts)
        holders = [self._holders[number] for number in numbers.tolist()]
        found = zip(holders, counts[numbers].tolist(), strict=True)
        return {holder: count for holder, count in found if holder is not None}

    def _keep(self, keys: Keys, ids: npt.NDArray[np.uint32]) -> Flags:
        """Return which entries still have a holder. Called once for each entry."""
        is_held = self._sets.are_held(ids)
        self._sets.release(ids[~is_held])
        return is_held


def keys_of(names: bytes | Sequence[BlockHash]) -> Keys:
    """Return the keys of names, which may be packed. A part of a name at the end is ignored."""
    packed = names if isinstance(names, bytes) else b"".join(names)
    num_names = len(packed) // HASH_BYTES
    words = np.frombuffer(packed[: num_names * HASH_BYTES], "<u8").astype(np.uint64, copy=False)
    return as_keys(words[:: HASH_BYTES // words.itemsize] * MULTIPLIER)


def _unique(keys: Keys) -> Keys:
    keys = np.sort(keys)
    return keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
