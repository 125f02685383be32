"""Prefix updates of a node and the router's index of them."""

from __future__ import annotations

import pytest

from baton.core.ids import PrefixKeys
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from baton.engine.kv_cache.block_hashes import BlockHash, PrefixNaming
from baton.router.routing.prefix_index import MAX_EXPECTED, NodePrefixes
from baton.rpc.cached_prefixes import (
    MAX_NAMES,
    MIN_LOG_LEN,
    CachedPrefixes,
    PrefixChanges,
    PrefixGap,
    PrefixWatcher,
    pack_names,
    unpack_names,
)
from baton.rpc.node_info import NodeLoad, changes_from, update_to


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def names(*numbers: int) -> bytes:
    return pack_names(name(number) for number in numbers)


def known(changes: PrefixChanges | None) -> tuple[int, bool, set[int], set[int]] | None:
    if changes is None:
        return None
    stored, removed = (
        {int.from_bytes(name, "little") for name in unpack_names(packed)}
        for packed in (changes.stored, changes.removed)
    )
    return changes.sequence, changes.is_snapshot, stored, removed


def stored(*numbers: int) -> BlockStored:
    return BlockStored(tuple(name(number) for number in numbers), None, (), 16)


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(tuple(name(number) for number in numbers))


def test_a_new_watcher_receives_a_snapshot_and_then_changes() -> None:
    cached = CachedPrefixes()
    cached.take([stored(1, 2, 3)])
    watcher = PrefixWatcher(cached)

    first = watcher.next()
    cached.take([removed(2), stored(4)])
    second, third = watcher.next(), watcher.next()

    assert known(first) == (1, True, {1, 2, 3}, set())
    assert known(second) == (2, False, {4}, {2})
    assert third is None


def test_an_empty_cache_is_reported_as_a_snapshot() -> None:
    assert PrefixWatcher(CachedPrefixes()).next() == PrefixChanges(1, True, b"")


def test_changes_that_cancel_out_are_not_reported() -> None:
    cached = CachedPrefixes()
    cached.take([stored(1)])
    watcher = PrefixWatcher(cached)
    watcher.next()

    cached.take([stored(2), removed(2), removed(1), stored(1)])

    assert watcher.next() is None


def test_a_cleared_cache_is_reported_as_a_snapshot() -> None:
    cached = CachedPrefixes()
    cached.take([stored(1, 2)])
    watcher = PrefixWatcher(cached)
    watcher.next()

    cached.take([AllBlocksCleared(), stored(3)])

    assert known(watcher.next()) == (2, True, {3}, set())


def test_a_watcher_far_behind_receives_a_snapshot_instead_of_changes() -> None:
    cached = CachedPrefixes()
    watcher = PrefixWatcher(cached)
    watcher.next()

    for number in range(MIN_LOG_LEN):
        cached.take([stored(number), removed(number)])
    cached.take([stored(7)])

    assert known(watcher.next()) == (2, True, {7}, set())


def test_large_changes_are_split() -> None:
    cached = CachedPrefixes()
    numbers = range(1, 6 * MAX_NAMES + 1)
    cached.take([stored(*numbers)])
    watcher = PrefixWatcher(cached)

    parts = [known(part) for part in iter(watcher.next, None)]
    cached.take([removed(*numbers[: MAX_NAMES + 1])])
    changes = [known(part) for part in iter(watcher.next, None)]

    assert [part and part[:2] for part in parts] == [(1, True), *((n, False) for n in range(2, 7))]
    assert [part and len(part[2]) for part in parts] == [MAX_NAMES] * 6
    assert set.union(*(part[2] for part in parts if part)) == set(numbers)
    assert [part and part[:3] for part in changes] == [(7, False, set()), (8, False, set())]
    assert [part and len(part[3]) for part in changes] == [MAX_NAMES, 1]


def test_changes_round_trip_through_protobuf() -> None:
    changes = PrefixChanges(9, False, names(1, 2), names(3))

    assert changes_from(update_to(NodeLoad(), changes)) == changes
    assert changes_from(update_to(NodeLoad())) is None


def test_a_truncated_name_is_ignored() -> None:
    prefixes = NodePrefixes()

    prefixes.take("a", PrefixChanges(1, True, names(1, 2)[:-1], b"x"))

    assert prefixes.match([name(1), name(2)]).reported == {"a": 1}


def test_a_router_matches_leading_blocks_without_a_gap() -> None:
    prefixes = NodePrefixes()
    prefixes.take("a", PrefixChanges(1, True, names(1, 2, 4)))
    prefixes.take("b", PrefixChanges(1, True, names(1, 2, 3, 4)))
    prefixes.take("c", PrefixChanges(1, True, names(2, 3)))

    assert prefixes.match([name(n) for n in (1, 2, 3, 4, 5)]).reported == {"a": 2, "b": 4}
    assert prefixes.match([]).reported == {}


def test_a_router_matches_up_to_the_last_snapshot_whatever_is_between() -> None:
    prefixes = NodePrefixes()
    prefixes.expect("b", [name(1)])
    for address, numbers in (("a", (2, 4, 9)), ("b", (3,)), ("c", (9,))):
        prefixes.take(address, PrefixChanges(1, True, names(*numbers)))
    prefixes.expect("b", [name(5)])

    matched = prefixes.match([name(n) for n in (1, 2, 3, 4, 5)], needs_snapshot=True)

    assert matched == ({"a": 4, "b": 3}, {"a": 4, "b": 5})


def test_a_missed_change_is_a_gap_until_the_next_snapshot() -> None:
    prefixes = NodePrefixes()
    prefixes.take("a", PrefixChanges(1, True, names(1)))

    with pytest.raises(PrefixGap):
        prefixes.take("a", PrefixChanges(3, False, names(2)))
    prefixes.take("a", PrefixChanges(1, True, names(5)))

    assert prefixes.match([name(1)]).reported == {}
    assert prefixes.match([name(5)]).reported == {"a": 1}


def test_a_lost_node_has_no_prefixes() -> None:
    prefixes = NodePrefixes()
    prefixes.take("a", PrefixChanges(1, True, names(1)))
    prefixes.expect("a", [name(2)])

    prefixes.drop("a")

    assert prefixes.match([name(1), name(2)]).expected == {}


def test_an_expected_prefix_counts_as_likely_until_the_node_reports_it() -> None:
    prefixes = NodePrefixes()
    prefixes.take("a", PrefixChanges(1, True, names()))
    prefixes.expect("a", [name(1), name(2)])
    before = dict(prefixes.match([name(1), name(2)]).expected)

    prefixes.take("a", PrefixChanges(2, False, names(1, 2)))
    prefixes.take("a", PrefixChanges(3, False, names(), names(2)))

    assert before == {"a": 2}
    assert (
        prefixes.match([name(1), name(2)]).reported
        == prefixes.match([name(1), name(2)]).expected
        == {"a": 1}
    )


def test_expected_prefixes_are_bounded() -> None:
    prefixes = NodePrefixes()

    prefixes.expect("a", [name(number) for number in range(MAX_EXPECTED + 1)])

    assert prefixes.match([name(0)]).expected == {}
    assert prefixes.match([name(1)]).expected == {"a": 1}


def test_names_equal_those_of_the_kv_cache() -> None:
    naming, keys = PrefixNaming(4, "salt", 3, max_shareable_prompt_len=6), PrefixKeys("s")

    short, same = naming.names(range(6), 6, keys), naming.names((*range(6), 9), 6, keys)
    long_prompt = naming.names(range(8), 8, keys)

    assert short == same
    assert short[0] != long_prompt[0]
