"""The contract of what backs the tiers: files, and objects in memory and on an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from baton.core.kv_hints import NO_HINTS, BlockHints, tenant_of
from baton.kv_transfer.tiers.stores.block_store import BlockStore
from benchmarks.chaos.s3_server import s3_server
from tests.support.block_stores import (
    LIMIT,
    MODEL,
    STORED_BYTES,
    FolderWorld,
    ObjectWorld,
    StoreWorld,
    memory_world,
    s3_world,
    scan_all,
)
from tests.support.s3_environment import point_environment_at
from tests.support.tier_memory import OwnedMemory, name_of


@pytest.fixture(params=["files", "memory", "s3"])
def stores(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreWorld]:
    if request.param == "files":
        yield FolderWorld(tmp_path)
    elif request.param == "memory":
        yield memory_world()
    else:
        with s3_server() as server:
            point_environment_at(server, monkeypatch)
            yield s3_world(server)


def opened(
    world: StoreWorld,
    fingerprint: str = MODEL,
    max_bytes: int = LIMIT,
    tenant_share: float = 1.0,
) -> BlockStore:
    return scan_all(world.open(fingerprint, max_bytes, tenant_share))


def write(
    store: BlockStore, memory: OwnedMemory, *numbers: int, hints: BlockHints = NO_HINTS
) -> None:
    for number in numbers:
        store.write(name_of(number), memory.blocks, number, memory.blocks.digest(number), hints)


def held(store: BlockStore, *numbers: int) -> list[bool]:
    return [store.holds(name_of(number)) for number in numbers]


def is_right(store: BlockStore, memory: OwnedMemory, number: int, into: int) -> bool:
    """Read a block. Returns whether there was one; its bytes must be right."""
    digest = store.read(name_of(number), memory.blocks, into)
    if digest is not None:
        assert digest == memory.blocks.digest(number)
        assert memory[into] == memory[number]
    return digest is not None


def cannot_delete() -> pytest.RaisesExc[OSError]:
    return pytest.raises(OSError, match=r"Is a directory|refused|Generic S3 error")


def test_a_block_survives_a_restart(stores: StoreWorld) -> None:
    memory = OwnedMemory(9)
    store = opened(stores)
    write(store, memory, 1, 2, 3, 4, 5, 6, 7)
    store.close()

    again = opened(stores)

    assert len(again.order) == 7
    assert len(again.order) * again.stored_bytes == 7 * STORED_BYTES
    assert again.holds(name_of(1))
    assert is_right(again, memory, 1, into=8)


def test_another_model_sees_no_block(stores: StoreWorld) -> None:
    write(opened(stores), OwnedMemory(2), 1)
    assert not opened(stores, fingerprint="another").holds(name_of(1))


def test_processes_see_blocks_that_others_write_and_remove(stores: StoreWorld) -> None:
    memory = OwnedMemory(4)
    one, other = opened(stores), opened(stores)
    write(one, memory, 1)
    assert not other.holds(name_of(1))
    one.refresh()
    other.refresh()
    assert other.holds(name_of(1))
    one.remove(name_of(1))
    write(one, memory, 2)
    one.refresh()
    other.refresh()
    assert not other.holds(name_of(1))
    assert is_right(other, memory, 2, into=3)


def test_blocks_of_an_ended_process_are_seen_by_others(stores: StoreWorld) -> None:
    memory = OwnedMemory(3)
    one, other = opened(stores), opened(stores)
    write(one, memory, 1)
    one.close()
    other.refresh()
    assert other.holds(name_of(1))
    assert is_right(other, memory, 1, into=2)


def test_blocks_removed_before_a_start_are_not_found_by_old_journals(stores: StoreWorld) -> None:
    memory = OwnedMemory(3)
    one, other = opened(stores), opened(stores)
    write(one, memory, 1)
    one.refresh()
    other.refresh()
    other.remove(name_of(1))
    other.refresh()

    third = opened(stores)
    third.refresh()

    assert not third.holds(name_of(1))


@pytest.mark.parametrize("operation", ["remove", "clear"])
def test_a_block_that_was_written_again_is_kept_when_its_removal_is_read(
    stores: StoreWorld, operation: str
) -> None:
    memory = OwnedMemory(2)
    one, other, third = opened(stores), opened(stores), opened(stores)
    write(one, memory, 1)
    for each in (one, other, third):
        each.refresh()
    if operation == "clear":
        other.clear()
    else:
        other.remove(name_of(1))
    write(one, memory, 1)

    for each in (one, other, one, third):  # some publish their changes at a refresh
        each.refresh()

    assert [held(each, 1) for each in (one, other, third)] == [[True]] * 3
    other.remove(name_of(1))
    for each in (other, one, third):
        each.refresh()
    assert [held(each, 1) for each in (one, other, third)] == [[False]] * 3


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "grow", "header", "other name"])
def test_a_damaged_block_is_a_miss_and_is_removed(stores: StoreWorld, damage: str) -> None:
    memory = OwnedMemory(4)
    store = opened(stores)
    write(store, memory, 1, 2)
    content = bytearray(stores.read(1))
    if damage == "flip":
        content[-7] ^= 1
    elif damage == "truncate":
        del content[-7:]
    elif damage == "empty":
        content.clear()
    elif damage == "grow":
        content += bytes(1 << 20)
    elif damage == "header":
        content[3] ^= 1
    else:
        content[:] = stores.read(2)
    stores.write(1, bytes(content))

    assert not is_right(store, memory, 1, into=3)
    assert not store.holds(name_of(1))
    assert stores.stored() == {name_of(2).hex()}
    assert is_right(store, memory, 2, into=3)


def test_an_object_that_is_too_large_is_not_read(stores: StoreWorld) -> None:
    if not isinstance(stores, ObjectWorld):
        pytest.skip("files have no objects")
    stores.objects.put("large", [bytes(65)])
    assert stores.objects.get("large", max_bytes=64) is None
    assert stores.objects.get("large", max_bytes=65) is not None


def test_an_externally_deleted_block_is_a_miss(stores: StoreWorld) -> None:
    memory = OwnedMemory(2)
    store = opened(stores)
    write(store, memory, 1)
    stores.delete(1)

    assert not is_right(store, memory, 1, into=0)
    assert not store.holds(name_of(1))


def test_the_least_recently_used_blocks_are_removed(stores: StoreWorld) -> None:
    memory = OwnedMemory(5)
    store = opened(stores, max_bytes=2 * STORED_BYTES)
    write(store, memory, 1, 2)
    assert is_right(store, memory, 1, into=4)
    write(store, memory, 3)
    store.refresh()

    assert [store.holds(name_of(number)) for number in (1, 2, 3)] == [True, False, True]
    assert store.order.num_evicted == 1
    assert len(store.order) == store.order.max_blocks
    assert stores.stored() == {name_of(number).hex() for number in (1, 3)}


def test_a_retained_block_is_not_evicted_and_a_released_one_first(stores: StoreWorld) -> None:
    memory = OwnedMemory(6)
    store = opened(stores, max_bytes=3 * STORED_BYTES)
    write(store, memory, 1, hints=BlockHints(retain_s=3600.0))
    write(store, memory, 2, 3)
    store.use([name_of(3)], BlockHints(is_released=True))
    write(store, memory, 4)
    assert held(store, 1, 2, 3, 4) == [True, True, False, True]
    write(store, memory, 5)
    assert held(store, 1, 2, 4, 5) == [True, False, True, True]


def test_the_quota_of_a_tenant_holds_after_a_restart(stores: StoreWorld) -> None:
    memory = OwnedMemory(7)
    tenant = BlockHints(tenant_of("a salt"))
    store = opened(stores)
    write(store, memory, 1)
    write(store, memory, 2, 3, 4, hints=tenant)

    again = opened(stores, max_bytes=4 * STORED_BYTES, tenant_share=0.5)
    write(again, memory, 5, hints=tenant)

    assert held(again, 1, 5) == [True, True]
    assert sum(held(again, 2, 3, 4)) == 1
    assert is_right(again, memory, 5, into=6)
    again.remove(name_of(5))
    assert not opened(stores).holds(name_of(5))


def test_a_removal_that_failed_is_repeated(stores: StoreWorld) -> None:
    store = opened(stores)
    write(store, OwnedMemory(2), 1, hints=BlockHints(tenant_of("a salt")))
    with stores.without_deletes(), cannot_delete():
        store.remove(name_of(1))

    store.remove(name_of(1))

    assert not store.holds(name_of(1))
    assert stores.stored() == set()


def test_a_block_unknown_to_a_process_is_removed(stores: StoreWorld) -> None:
    memory = OwnedMemory(5)
    store, other = opened(stores), opened(stores)
    write(other, memory, 1, hints=BlockHints(tenant_of("a salt")))
    write(other, memory, 2)
    other.write(name_of(1, group=2), memory.blocks, 1, memory.blocks.digest(1))

    store.remove(name_of(1))

    assert stores.stored() == {name_of(2).hex(), name_of(1, group=2).hex()}


def test_blocks_that_could_not_be_evicted_still_count(stores: StoreWorld) -> None:
    memory = OwnedMemory(6)
    store = opened(stores, max_bytes=3 * STORED_BYTES, tenant_share=0.67)
    write(store, memory, 1, 2, hints=BlockHints(tenant_of("a salt")))
    write(store, memory, 3)
    with stores.without_deletes():
        for tenant in ("", "a salt"):
            with cannot_delete():
                write(store, memory, 4, hints=BlockHints(tenant_of(tenant)))
    assert held(store, 1, 2, 3, 4) == [True, True, True, False]
    assert (len(store.order), store.order.num_evicted) == (3, 0)

    write(store, memory, 4)

    assert sum(held(store, 1, 2, 3, 4)) == len(stores.stored()) == 3
    assert store.order.num_evicted == 1


def test_blocks_of_others_that_could_not_be_evicted_still_count(stores: StoreWorld) -> None:
    memory = OwnedMemory(6)
    store, other = opened(stores, max_bytes=2 * STORED_BYTES), opened(stores)
    write(other, memory, 1, 2, 3, hints=BlockHints(tenant_of("a salt")))
    other.refresh()
    with stores.without_deletes(), cannot_delete():
        store.refresh()

    store.refresh()

    assert len(stores.stored()) == len(store.order) == 2


def test_a_clear_that_failed_is_repeated(stores: StoreWorld) -> None:
    memory = OwnedMemory(6)
    store = opened(stores)
    write(store, memory, 1, 2, 3, 4, hints=BlockHints(tenant_of("a salt")))
    with stores.without_deletes(), cannot_delete():
        store.clear()

    store.clear()

    assert stores.stored() == set()
    assert not len(store.order)


def test_clear_removes_the_blocks_of_all_processes(stores: StoreWorld) -> None:
    memory = OwnedMemory(6)
    one, other = opened(stores), opened(stores)
    write(one, memory, 1, 3, 4, 5)
    write(other, memory, 2)
    other.refresh()
    one.clear()
    one.refresh()
    other.refresh()

    assert stores.stored() == set()
    assert not len(one.order)
    assert not other.holds(name_of(2))


def test_what_is_written_after_a_clear_is_found_by_all_processes(stores: StoreWorld) -> None:
    memory = OwnedMemory(6)
    one, other, third = opened(stores), opened(stores), opened(stores)
    write(one, memory, 1)
    one.refresh()
    other.refresh()
    one.clear()
    write(other, memory, 2)
    other.refresh()
    third.refresh()
    one.refresh()
    for store in (other, third):
        store.refresh()
        assert held(store, 1, 2) == [False, True]
        assert is_right(store, memory, 2, into=5)


def test_a_clear_during_a_scan_leaves_what_is_written_after_it() -> None:
    world, memory = memory_world(), OwnedMemory(9)
    one, other = opened(world), world.open()
    write(one, memory, *range(8))
    assert not other.scan()
    one.clear()
    write(one, memory, 8)
    one.refresh()
    other.refresh()
    scan_all(other)
    assert other.order.names == [name_of(8)]


@pytest.mark.parametrize("failing", [2, 3], ids=["journals", "blocks"])
def test_a_listing_that_failed_after_a_clear_is_repeated(failing: int) -> None:
    lists = count(1)

    def fail_one(operation: str) -> None:
        if operation == "list" and next(lists) == failing:
            raise OSError("unreachable")

    world, memory = memory_world(), OwnedMemory(3)
    one, other = opened(world), opened(world)
    write(one, memory, 1)
    one.refresh()
    other.refresh()
    one.clear()
    write(one, memory, 2)
    one.refresh()
    world.server.before = fail_one
    with pytest.raises(OSError, match="unreachable"):
        other.refresh()

    other.refresh()

    assert held(other, 1, 2) == [False, True]


def test_two_processes_may_write_the_same_block(stores: StoreWorld) -> None:
    memory = OwnedMemory(3)
    one, other = opened(stores), opened(stores)
    write(one, memory, 1)
    write(other, memory, 1)
    assert stores.stored() == {name_of(1).hex()}
    assert is_right(one, memory, 1, into=2)
    assert is_right(other, memory, 1, into=2)


def test_a_block_removed_by_one_process_can_be_written_by_another(stores: StoreWorld) -> None:
    memory = OwnedMemory(3)
    one, other = opened(stores), opened(stores)
    write(one, memory, 1)
    one.refresh()
    other.refresh()
    other.remove(name_of(1))
    write(other, memory, 1)
    other.refresh()
    one.refresh()
    assert is_right(one, memory, 1, into=2)


def test_equal_hashes_of_different_groups_are_different_blocks(stores: StoreWorld) -> None:
    memory = OwnedMemory(3)
    store = opened(stores)
    store.write(name_of(1, group=2), memory.blocks, 1, memory.blocks.digest(1))
    assert not store.holds(name_of(1))
    assert opened(stores).read(name_of(1, group=2), memory.blocks, 2) is not None


def test_removing_an_absent_block_affects_no_other(stores: StoreWorld) -> None:
    memory = OwnedMemory(3)
    store = opened(stores)
    write(store, memory, 1)
    store.remove(name_of(2))  # which is not there
    assert is_right(opened(stores), memory, 1, into=2)


def test_a_limit_below_one_block_is_refused(stores: StoreWorld) -> None:
    with pytest.raises(InvalidConfig, match="-size is 100 bytes; a block takes 4160"):
        opened(stores, max_bytes=100)
