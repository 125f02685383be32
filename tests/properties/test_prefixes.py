"""Prefix index of a router under random events: it equals the node's cache and host memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.router.routing.prefix_index import NodePrefixes
from baton.rpc.cached_prefixes import CachedPrefixes, PrefixWatcher
from baton.rpc.node_info import NodeLoad, changes_from, update_to
from tests.support.tier_memory import host_tier

NAMES = [BlockHash(number.to_bytes(16, "little")) for number in range(12)]

some_names = st.lists(st.sampled_from(NAMES), max_size=4).map(tuple)
kv_events = st.one_of(
    some_names.map(lambda names: BlockStored(names, None, (), 16)),
    some_names.map(BlockRemoved),
    st.just(AllBlocksCleared()),
)
host_changes = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("clear"), st.just(NAMES[0])),
)
HostChange = tuple[str, BlockHash]
# Each step: events of the prefix cache, changes of the host memory, whether the node reads both,
# which of two routers read, and which one restarts.
steps = st.lists(
    st.tuples(
        st.lists(kv_events, max_size=3),
        st.lists(host_changes, max_size=3),
        st.booleans(),
        st.sets(st.integers(0, 1)),
        st.none() | st.integers(0, 1),
    ),
    max_size=40,
)


def after(names: set[BlockHash], event: KvEvent) -> set[BlockHash]:
    match event:
        case BlockStored():
            return names | set(event.block_hashes)
        case BlockRemoved():
            return names - set(event.block_hashes)
        case AllBlocksCleared():
            return set()


def change(host: HostTier, kind: str, name: BlockHash) -> None:
    """Change the names that a host memory of four blocks holds."""
    match kind:
        case "add":
            block = host.reserve()  # it may replace another one
            assert block is not None
            host.publish(name, block, b"")
            host.unpin(block)
        case "remove":
            host.remove(name)
        case _:
            host.clear()


@given(steps)
def test_every_router_index_equals_the_content_of_cache_and_host_memory(
    history: list[tuple[list[KvEvent], list[HostChange], bool, set[int], int | None]],
) -> None:
    cached, host = CachedPrefixes(), host_tier(4)
    in_cache, expected = set[BlockHash](), set[BlockHash]()
    unread: list[KvEvent] = []
    watchers = [PrefixWatcher(cached) for _ in range(2)]
    routers = [NodePrefixes() for _ in range(2)]

    for events, changes_of_host, is_read, looking, renewed in history:
        unread += events
        for event in events:
            in_cache = after(in_cache, event)
        for kind, name in changes_of_host:
            change(host, kind, name)
        if is_read:
            cached.take(unread, host.take_changes())
            unread.clear()
            expected = in_cache | {name for name in NAMES if host.holds(name)}
        if renewed is not None:
            watchers[renewed] = PrefixWatcher(cached)
        for number in looking:
            changes = watchers[number].next()
            if changes is not None:
                reported = changes_from(update_to(NodeLoad(), changes))
                assert reported is not None
                routers[number].take("node", reported)
            known = {name for name in NAMES if routers[number].match([name]).reported}
            assert known == expected


@given(
    st.dictionaries(st.sampled_from("abc"), st.sets(st.sampled_from(NAMES))),
    st.lists(st.sampled_from(NAMES), unique=True),
)
def test_a_match_is_the_longest_contiguous_prefix_of_each_node(
    held: dict[str, set[BlockHash]], requested: list[BlockHash]
) -> None:
    prefixes = NodePrefixes()
    for holder, names in held.items():
        prefixes.expect(holder, names)

    matched = prefixes.match(requested).expected

    for holder, names in held.items():
        lengths = [n for n in range(len(requested) + 1) if names.issuperset(requested[:n])]
        assert matched.get(holder, 0) == max(lengths)
