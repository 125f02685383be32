"""Names in host memory as routers know them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import HostNames, name_in_group, snapshot_names
from baton.engine.kv_cache.config import CacheConfig
from baton.engine.kv_cache.groups import CacheLayout
from baton.kv_transfer.external_kv import HeldChanges

BLOCKS = [BlockHash(bytes((number,)) * 16) for number in range(3)]
NUM_PARTS = 2
PARTS = [name for block in BLOCKS for name in snapshot_names(block, NUM_PARTS)]


def test_only_blocks_of_the_first_group_are_known() -> None:
    names, (one, two, _) = HostNames(CacheConfig(8)), BLOCKS
    changes = HeldChanges((one, name_in_group(one, 1)), (name_in_group(two, 1), two))

    assert names.translate(changes) == HeldChanges((one,), (two,))


@given(st.lists(st.lists(st.sampled_from([*PARTS, *BLOCKS]), unique=True), max_size=12))
def test_a_snapshot_is_known_while_all_of_its_parts_are_held(
    toggled: list[list[BlockHash]],
) -> None:
    names, held, known = (
        HostNames(CacheConfig(8, layout=CacheLayout(num_state_blocks=NUM_PARTS))),
        set[BlockHash](),
        set[bytes](),
    )

    for batch in toggled:
        changes = HeldChanges(
            added=tuple(name for name in batch if name not in held),
            removed=tuple(name for name in batch if name in held),
        )
        held ^= set(batch)
        translated = names.translate(changes)
        assert known.isdisjoint(translated.added)
        assert known.issuperset(translated.removed)
        known = (known - set(translated.removed)) | set(translated.added)

        whole = (block for block in BLOCKS if held.issuperset(snapshot_names(block, NUM_PARTS)))
        assert known == set(whole)
