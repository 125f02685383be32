"""Names of cached blocks and the nodes that hold them, for hundreds of nodes. Pure.

Two names can have the same key, with the odds that `key_table` states. Then a match can be too
long, which costs a worse choice of nodes, but no wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.router.routing.key_table import MAX_NUMBER, Flags, Keys, KeyTable, Numbers, as_keys

MAX_BATCH = 4096  # names that are taken in at once
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # spreads the bits of a name
Bits = npt.NDArray[np.uint64]

NO_HOLDERS = 0  # id of the empty set
WORD_BITS = 64
MIN_HOLDERS = 512
# Memory that is not touched takes no space, and copies of larger arrays would take long.
MIN_SETS = 1 << 16


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


class HolderSets:
    """Sets of holders by id. A holder is a small number, the place of a bit in each row.

    Many blocks have the same holders, such as those of a shared system prompt. A set is a row of
    bits, and is found by its hash: the exclusive or of random numbers of its members.
    """

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
