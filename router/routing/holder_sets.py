"""Sets of holders, each stored once. Pure.

Many blocks have the same holders, such as those of a shared system prompt. A set is a row of bits,
and is found by its hash: the exclusive or of random numbers of its members.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.router.routing.key_table import MAX_NUMBER, Flags, Keys, KeyTable, Numbers, as_keys

Bits = npt.NDArray[np.uint64]

NO_HOLDERS = 0  # id of the empty set
WORD_BITS = 64
MIN_HOLDERS = 512
# Memory that is not touched takes no space, and copies of larger arrays would take long.
MIN_SETS = 1 << 16


class HolderSets:
    """Sets of holders by id. A holder is a small number, the place of a bit in each row."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._member_hashes: Keys = self._random.integers(1, 1 << 63, MIN_HOLDERS, np.uint64)
        self._bits: Bits = np.zeros((MIN_SETS, MIN_HOLDERS // WORD_BITS), np.uint64)
        self._hashes: Keys = np.zeros(MIN_SETS, np.uint64)
        self._num_blocks = np.zeros(MIN_SETS, np.int64)  # whose holders are this set
        self._num_sets = 1  # rows used so far; the first is the empty set
        self._free: list[int] = []  # rows among them that can be used again
        # By hash. Sets change when a holder is dropped: then their entries are outdated.
        self._id_by_hash = KeyTable(
            lambda keys, ids: as_keys(self._hashes[ids]) == keys,
            lambda: self._num_sets - len(self._free),
        )
        self.num_held = 0  # blocks that have a holder

    @property
    def num_bytes(self) -> int:
        row_bytes = self._bits.shape[1] * self._bits.itemsize + 2 * self._hashes.itemsize
        return int(self._num_sets * row_bytes + self._id_by_hash.num_bytes)

    def make_room_for(self, holder: int) -> None:
        while holder >= len(self._member_hashes):
            more = self._random.integers(1, 1 << 63, len(self._member_hashes), np.uint64)
            self._member_hashes = np.concatenate((self._member_hashes, more))
            self._bits = np.hstack((self._bits, np.zeros_like(self._bits)))

    def bits(self, ids: Numbers) -> Bits:
        return self._bits[ids]

    def have(self, ids: Numbers, holder: int) -> Flags:
        """Return which of these sets a holder is in."""
        word, bit = _word_and_bit(holder)
        rows: Bits = self._bits[ids, word]
        are_held: Flags = (rows & bit) != 0
        return are_held

    def are_held(self, ids: Numbers) -> Flags:
        """Return which of these sets have a member."""
        are_held: Flags = self._hashes[ids] != 0
        return are_held

    def toggle(self, ids: Numbers, holder: int) -> Numbers:
        """Return the sets of blocks with these sets once a holder has been added or removed."""
        if len(ids) and (ids == ids[0]).all():  # most often
            kinds, kind_of, counts = ids[:1], np.zeros(len(ids), np.int64), np.array([len(ids)])
        else:
            kinds, kind_of, counts = np.unique(ids, return_inverse=True, return_counts=True)
        new_kinds = self._toggled(kinds, holder)
        self._count(kinds, -counts)
        self._count(new_kinds, counts)
        return new_kinds[kind_of]

    def release(self, ids: Numbers) -> None:
        """Forget blocks with these sets, which have no holder any more."""
        np.subtract.at(self._num_blocks, ids[ids != NO_HOLDERS], 1)

    def drop(self, holder: int) -> None:
        word, bit = _word_and_bit(holder)
        rows = np.flatnonzero(self._bits[: self._num_sets, word] & bit)
        self._bits[rows, word] &= ~bit
        self._hashes[rows] ^= self._member_hashes[holder]
        left = self._hashes[rows] != 0
        self.num_held -= int(self._num_blocks[rows[~left]].sum())
        hashes, first = np.unique(self._hashes[rows[left]], return_index=True)
        is_new = self._find(hashes) == NO_HOLDERS
        self._put(hashes[is_new], rows[left][first[is_new]].astype(np.uint32))

    def _toggled(self, ids: Numbers, holder: int) -> Numbers:
        hashes = self._hashes[ids] ^ self._member_hashes[holder]
        found = self._find(hashes)
        missing = np.flatnonzero((found == NO_HOLDERS) & (hashes != 0))
        # Equal sets can have different ids after a holder was dropped.
        new, first, which = np.unique(hashes[missing], return_index=True, return_inverse=True)
        if len(new) and self._make_rows(len(new), in_use=(ids, found)):
            rows = self._take_rows(len(new))
            word, bit = _word_and_bit(holder)
            self._bits[rows] = self._bits[ids[missing[first]]]
            self._bits[rows, word] ^= bit
            self._hashes[rows] = new
            self._put(new, rows)
            found[missing] = rows[which]
        return found

    def _find(self, hashes: Keys) -> Numbers:
        """Return the ids of the sets with these hashes; NO_HOLDERS for those that do not exist."""
        ids = self._id_by_hash.get(as_keys(hashes))
        ids[self._hashes[ids] != hashes] = NO_HOLDERS
        return ids

    def _put(self, hashes: Keys, ids: Numbers) -> None:
        self._id_by_hash.put(self._id_by_hash.look_up(as_keys(hashes)), ids)

    def _count(self, ids: Numbers, num_blocks: npt.NDArray[np.int64]) -> None:
        np.add.at(self._num_blocks, ids, num_blocks)
        self._num_blocks[NO_HOLDERS] = 0
        self.num_held += int(num_blocks[self._hashes[ids] != 0].sum())

    def _make_rows(self, count: int, in_use: tuple[Numbers, Numbers]) -> bool:
        """Return whether there is room for new sets: there are fewer than 16 million."""
        if self._num_sets + count > len(self._hashes) and len(self._free) < count:
            self._find_free(in_use)
        while self._num_sets + count > len(self._hashes) and len(self._free) < count:
            if len(self._hashes) > MAX_NUMBER:
                return False
            self._bits = np.vstack((self._bits, np.zeros_like(self._bits)))
            self._hashes = np.concatenate((self._hashes, np.zeros_like(self._hashes)))
            self._num_blocks = np.concatenate((self._num_blocks, np.zeros_like(self._num_blocks)))
        return True

    def _take_rows(self, count: int) -> Numbers:
        from_free = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first = self._num_sets
        self._num_sets += count - len(from_free)
        return np.array([*from_free, *range(first, self._num_sets)], np.uint32)

    def _find_free(self, in_use: tuple[Numbers, Numbers]) -> None:
        is_free = self._num_blocks[: self._num_sets] == 0
        is_free[NO_HOLDERS] = False
        for ids in in_use:
            is_free[ids] = False
        rows = np.flatnonzero(is_free)
        self._bits[rows] = 0
        self._hashes[rows] = 0
        self._free = rows.tolist()


def _word_and_bit(holder: int) -> tuple[int, np.uint64]:
    return holder // WORD_BITS, np.uint64(1) << np.uint64(holder % WORD_BITS)
