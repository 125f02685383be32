"""Blocks after which a prefix hit can end, as routers know them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import PrefixEnds, name_in_group, snapshot_names
from baton.engine.kv_cache.groups import CacheLayout

BLOCKS = [BlockHash(bytes((number,)) * 16) for number in range(3)]
NUM_PARTS = 2
PARTS = [name for block in BLOCKS for name in snapshot_names(block, 1, NUM_PARTS)]


def test_only_blocks_of_the_first_group_are_reported() -> None:
    ends, (one, two, _) = PrefixEnds(CacheLayout()), BLOCKS

    assert ends.add([one, name_in_group(one, 1)]) == [one]
    assert ends.remove([name_in_group(two, 1), two]) == [two]


@given(st.lists(st.lists(st.sampled_from([*PARTS, *BLOCKS]), unique=True), max_size=12))
def test_a_snapshot_is_known_while_all_of_its_parts_are_held(
    toggled: list[list[BlockHash]],
) -> None:
    ends, held, known = (
        PrefixEnds(CacheLayout(num_state_blocks=NUM_PARTS)),
        set[BlockHash](),
        set[BlockHash](),
    )

    for batch in toggled:
        lost = ends.remove(name for name in batch if name in held)
        gained = ends.add(name for name in batch if name not in held)
        held ^= set(batch)
        assert known.issuperset(lost)
        known -= set(lost)
        assert known.isdisjoint(gained)
        known |= set(gained)

        whole = {block for block in BLOCKS if held.issuperset(snapshot_names(block, 1, NUM_PARTS))}
        assert known == whole == {block for block in BLOCKS if block in ends}
