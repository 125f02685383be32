"""A KV cache in the memory of a simulated device, for tests of the tiers below it."""

from __future__ import annotations

import random

import torch

from baton.engine.runner.device.block_copies import BlockCopies
from baton.kv_transfer.tiers.device_kv_access import DeviceKvAccess
from baton.kv_transfer.tiers.kv_access import CopyBlocks, KvAccess, copy_blocks
from tests.support.fake_device import Costs, FakeDevice
from tests.support.tier_memory import BLOCK_BYTES, OwnedMemory

PASS_S = 1.0  # in which thousands of blocks are copied
NUM_STAGING = 9  # as many as files and objects are read at a time


class DeviceMemory:
    """Blocks of random bytes, which passes write: it is garbage until they land."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self.device = FakeDevice(costs=Costs(block_copy_s=PASS_S / 1000))
        kv = self.device.allocate(torch.empty((num_blocks, BLOCK_BYTES), dtype=torch.uint8))
        self.stream = self.device.make_copy_stream()
        self.copies = BlockCopies(kv, self.stream, self.device.record)
        self._hidden = kv.hidden
        chance = random.Random(seed)
        for block in range(num_blocks):
            self.write(block, chance.randbytes(BLOCK_BYTES))

    def __getitem__(self, block: int) -> bytes:
        """Return what a pass after those launched so far would read."""
        self.device.wait()
        return self._hidden[block].numpy().tobytes()

    def write(self, block: int, content: bytes) -> None:
        """Launch a pass that writes a block."""
        self._hidden[block].fill_(0xEE)
        written = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.device.enqueue(lambda: self._hidden[block].copy_(written), PASS_S)

    def wipe(self, block: int) -> None:
        self.write(block, bytes(BLOCK_BYTES))

    def kv_access(self, host: OwnedMemory, copy: CopyBlocks = copy_blocks) -> KvAccess:
        if copy is not copy_blocks:
            raise ValueError("the device copies by itself")
        staging = OwnedMemory(NUM_STAGING)
        for memory in (host, staging):
            self.copies.pin(memory.mapping)
        return DeviceKvAccess(self.copies, staging.blocks)

    def check(self) -> None:
        """Raise if a copy is still in progress, or memory is pinned."""
        if not self.stream.is_idle or self.stream.num_pinned:
            raise RuntimeError("a copy is in progress, or memory is pinned")
