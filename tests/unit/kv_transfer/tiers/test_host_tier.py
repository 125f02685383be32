from __future__ import annotations

from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, tenant_of
from baton.kv_transfer.tiers.host_tier import HostBlock, HostTier
from tests.support.tier_memory import host_tier, name_of


def test_the_least_recently_used_block_is_replaced() -> None:
    host = host_tier(2)
    for number in (1, 2):
        host.unpin(add(host, number))
    used = host.pin(name_of(1))
    assert used is not None
    host.unpin(used)
    add(host, 3)

    assert [host.holds(name_of(number)) for number in (1, 2, 3)] == [True, False, True]
    assert host.order.num_evicted == 1


def test_a_pinned_block_is_not_replaced() -> None:
    host = host_tier(1)
    block = add(host, 1)
    assert host.reserve() is None
    host.unpin(block)
    assert host.reserve() is not None


def test_pinned_blocks_are_skipped_by_eviction() -> None:
    host = host_tier(100)
    blocks = [add(host, number) for number in range(100)]
    assert not list(host.order.victims(SHARED, 0.0))
    host.unpin(blocks[60])
    assert list(host.order.victims(SHARED, 0.0)) == [name_of(60)]


def test_free_space_is_announced_once_after_a_failed_reservation() -> None:
    host = host_tier(2)
    announced: list[str] = []
    host.on_room = lambda: announced.append("room")
    blocks = [add(host, 1), add(host, 2)]
    assert host.reserve() is None
    assert not announced
    host.unpin_all(blocks)
    assert announced == ["room"]
    assert host.reserve() is not None
    host.unpin(add(host, 3))
    assert announced == ["room"]


def test_a_block_that_was_removed_while_pinned_does_not_unpin_its_successor() -> None:
    host = host_tier(2)
    old = add(host, 1)
    host.remove(name_of(1))
    new = add(host, 1)
    host.unpin(old)
    assert host.pin(name_of(1)) is new
    host.unpin(new)
    assert add(host, 2).slot != new.slot
    assert host.reserve() is None


def test_a_removed_block_keeps_its_slot_during_a_read() -> None:
    host = host_tier(1)
    block = add(host, 1)
    host.clear()

    assert not host.holds(name_of(1))
    assert host.reserve() is None
    host.unpin(block)
    assert add(host, 2).slot == block.slot
    assert host.reserve() is None


def test_a_second_block_with_the_same_name_is_dropped() -> None:
    host = host_tier(2)
    first, second = add(host, 1), add(host, 1)
    host.unpin(first)
    host.unpin(second)

    assert host.pin(name_of(1)) is first
    assert add(host, 2).slot == second.slot


def test_an_abandoned_block_is_free() -> None:
    host = host_tier(1)
    block = host.reserve()
    assert block is not None
    host.abandon(block)
    assert host.reserve() is not None


def test_changes_are_reported_once_and_those_that_cancel_out_never() -> None:
    host = host_tier(2)
    for number in (1, 2, 3):  # the third replaces the first
        host.unpin(add(host, number))

    first = host.take_changes()
    host.remove(name_of(2))
    host.unpin(add(host, 2))
    second = host.take_changes()
    host.clear()
    third = host.take_changes()

    assert set(first.added) == {name_of(2), name_of(3)}
    assert first.removed == second.added == second.removed == third.added == ()
    assert set(third.removed) == {name_of(2), name_of(3)}


def test_a_retained_block_is_replaced_only_after_its_retention_time() -> None:
    now_s = [0.0]
    host = host_tier(2, clock=lambda: now_s[0])
    for number, hints in ((1, BlockHints(retain_s=9.0)), (2, NO_HINTS), (3, NO_HINTS)):
        host.unpin(add(host, number, hints))
    assert [host.holds(name_of(number)) for number in (1, 2, 3)] == [True, False, True]

    now_s[0] = 9.0
    for number in (4, 5):
        host.unpin(add(host, number))

    assert [host.holds(name_of(number)) for number in (1, 4, 5)] == [False, True, True]


def test_half_of_the_blocks_can_be_retained_and_more_are_refused() -> None:
    host = host_tier(4)
    for number in (1, 2, 3):
        host.unpin(add(host, number, BlockHints(retain_s=9.0)))
    for number in (4, 5, 6):
        host.unpin(add(host, number))

    assert [host.holds(name_of(number)) for number in (1, 2, 3)] == [True, True, False]
    assert (host.order.num_retained, host.order.num_refused) == (2, 1)


def test_a_released_block_is_replaced_first_unless_it_is_used_again() -> None:
    host = host_tier(4)
    for number in (1, 2, 3, 4):
        host.unpin(add(host, number))
    host.use([name_of(3), name_of(4)], BlockHints(is_released=True))
    host.use([name_of(4)], NO_HINTS)
    for number in (5, 6):
        host.unpin(add(host, number))

    assert [host.holds(name_of(number)) for number in (1, 2, 3, 4)] == [False, True, False, True]


def test_a_tenant_at_its_quota_replaces_its_own_blocks() -> None:
    host = host_tier(4, tenant_share=0.5)
    tenant = BlockHints(tenant_of("a salt"))
    host.unpin(add(host, 1))
    for number in (2, 3, 4):
        host.unpin(add(host, number, tenant))

    assert [host.holds(name_of(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_blocks_that_are_still_written_to_count_for_the_quota() -> None:
    host = host_tier(8, tenant_share=0.25)
    tenant = tenant_of("a salt")
    first, second = host.reserve(tenant), host.reserve(tenant)
    assert first is not None
    assert second is not None
    assert host.is_at_quota(tenant)
    assert host.reserve(tenant) is None
    assert not host.is_at_quota(tenant_of("another salt"))

    host.abandon(first)
    host.publish(name_of(1), second, b"", BlockHints(tenant))
    assert not host.is_at_quota(tenant)
    assert host.reserve(tenant) is not None
    assert host.reserve(tenant) is None


def add(host: HostTier, number: int, hints: BlockHints = NO_HINTS) -> HostBlock:
    """Add a block, which stays pinned."""
    block = host.reserve(hints.tenant)
    assert block is not None
    host.publish(name_of(number), block, b"", hints)
    return block
