"""Replay of KV events: a subscriber that joins at any point has the exact content of the cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.node.kv.events.history import EventHistory
from baton.node.kv.events.messages import CacheFacts, encode_batch
from tools.follow_kv_events import CacheView, decode_maps

NUM_NAMES = 8
UNSALTED, SALTED = BlockHash(b"u" * 16), BlockHash(b"s" * 16)
ADAPTERS = AdapterRef("a", "0" * 31 + "1"), AdapterRef("b", "0" * 31 + "1")
FACTS = CacheFacts(1, lambda _: UNSALTED, "full_attention")


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    """Draw a run of blocks. The names before and after a block are always the same, as hashes."""
    start = draw(st.integers(0, NUM_NAMES - 1))
    end = draw(st.integers(start + 1, NUM_NAMES))
    parent = name_of(start - 1) if start % 4 else None  # two sequences
    end = min(end, start // 4 * 4 + 4)
    names = tuple(map(name_of, range(start, end)))
    # The second sequence is salted, and its adapter has a name in each request.
    root = SALTED if start >= 4 else UNSALTED
    adapter = draw(st.sampled_from(ADAPTERS)) if start >= 4 else NO_ADAPTER
    return BlockStored(names, parent, tuple(range(start, end)), 1, root, adapter)


removals = st.lists(st.integers(0, NUM_NAMES - 1), min_size=1, max_size=3).map(
    lambda numbers: BlockRemoved(tuple(map(name_of, numbers)))
)
kv_events = st.one_of(stores(), stores(), removals, st.just(AllBlocksCleared()))
batches = st.lists(st.lists(kv_events, min_size=1, max_size=3), min_size=1, max_size=12)


def view_after(payloads: list[bytes]) -> CacheView:
    view = CacheView()
    for payload in payloads:
        for event in decode_maps(payload):
            view.apply(event)
    return view


@given(batches, st.integers(1, 6), st.data())
def test_a_late_subscriber_has_the_content_of_the_cache(
    updates: list[list[KvEvent]], buffer_steps: int, data: st.DataObject
) -> None:
    history = EventHistory(FACTS, buffer_steps)
    payloads = [encode_batch(FACTS.to_batch(events, 0.0)) for events in updates]
    for sequence, payload in enumerate(payloads):
        history.append(sequence, payload)
    num_seen = data.draw(st.integers(0, len(payloads)))

    replayed = list(history.since(num_seen))

    sequences = [message.sequence for message in replayed]
    oldest = max(num_seen, len(payloads) - buffer_steps - 1)
    assert sequences == list(range(oldest, len(payloads)))
    view = view_after([*payloads[:num_seen], *(message.payload for message in replayed)])
    assert view.blocks == view_after(payloads).blocks
