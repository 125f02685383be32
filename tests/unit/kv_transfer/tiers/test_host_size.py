"""Size of host memory for KV: its bound by default, and its growth in steps."""

from __future__ import annotations

import pytest

from baton.core.kv_hints import BlockHints, tenant_of
from baton.kv_transfer.tiers.host_growth import RETRY_S, HostGrowth, auto_host_bytes
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import BlockMemory

GIB, MIB = 1 << 30, 1 << 20
BLOCK_BYTES, STEP_BLOCKS = 4096, 4


class Machine:
    """Free memory of a machine, and its clock."""

    def __init__(self) -> None:
        self.has_room, self.now = True, 0.0

    def tier(self, num_blocks: int, tenant_share: float = 1.0) -> HostTier:
        memory = BlockMemory(0, num_blocks, BLOCK_BYTES)
        growth = HostGrowth(
            memory, lambda: self.has_room, STEP_BLOCKS * BLOCK_BYTES, lambda: self.now
        )
        return HostTier(memory, None, tenant_share, lambda: self.now, growth)


def store(host: HostTier, number: int, salt: str = "") -> int:
    """Store a block. Returns its place."""
    tenant = tenant_of(salt)
    block = host.reserve(tenant)
    assert block is not None
    host.publish(number.to_bytes(16, "big"), block, b"", BlockHints(tenant))
    host.unpin(block)
    return block.slot


@pytest.mark.parametrize(
    ("spare_bytes", "kv_bytes", "expected"),
    [
        (2 * GIB, 2 * GIB, GIB),
        (4 * GIB, 64 * MIB, 512 * MIB),  # a multiple of a small cache
        (0, 4 * GIB, 64 * MIB),
    ],
)
def test_host_memory_takes_half_of_what_the_kv_cache_leaves(
    spare_bytes: int, kv_bytes: int, expected: int
) -> None:
    assert auto_host_bytes(spare_bytes, kv_bytes) == expected


def test_host_memory_grows_in_steps_and_only_when_it_is_used() -> None:
    host = Machine().tier(10)
    grown: list[int] = []
    host.on_grown = grown.append

    before = list(grown)
    slots = [store(host, number) for number in range(11)]

    assert not before
    assert slots == [*range(10), 0]
    assert grown == [4, 8, 10]
    host.check()


def test_host_memory_does_not_grow_while_the_machine_is_short_of_memory() -> None:
    machine = Machine()
    host = machine.tier(12)
    machine.has_room = False
    slots = [store(host, number) for number in range(6)]
    short_of = host.order.max_blocks
    machine.has_room = True
    slots.append(store(host, 6))
    machine.now += RETRY_S
    host.remove((5).to_bytes(16, "big"))
    slots += [store(host, number) for number in (7, 8)]

    assert slots == [0, 1, 2, 3, 0, 1, 2, 1, 4]
    assert short_of == 4
    assert host.order.max_blocks == 12
    host.check()


def test_tenants_share_what_host_memory_has_while_it_cannot_grow() -> None:
    machine = Machine()
    host = machine.tier(100, tenant_share=0.5)
    machine.has_room = False
    for number in range(4):
        store(host, number)
    for number in range(4, 10):
        store(host, number, "salt")

    assert sum(host.holds(number.to_bytes(16, "big")) for number in range(4)) == 2
