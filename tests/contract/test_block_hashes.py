"""Hashes of KV blocks: one number for a block, wherever it is and whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import xxhash
from torch import Tensor

from baton.core.ids import BlockId
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.kv_transfer.protocol.digest import BlockDigest, hash_region
from baton.kv_transfer.protocol.messages import Region
from tests.support.device_tensors import PLACE
from tests.support.fake_device import FakeDevice
from tests.support.triton_parts import interpreted_parts, kernels_on, require_triton

IDS = [BlockId(block) for block in (3, 0, 4, 1, 1, 2)]
# Around the sizes of stripes of 64 bytes and pieces of 1 KiB, in words of 8 bytes.
WORDS = (31, 32, 33, 40, 127, 128, 129, 136, 256, 257, 392)


def drawn(num_words: int) -> Tensor:
    """Return five blocks of random bits."""
    generator = torch.Generator().manual_seed(num_words)
    return torch.randint(-(2**63), 2**63 - 1, (5, 1, num_words), generator=generator)


def expected(kv: Tensor, block_ids: Sequence[BlockId]) -> bytes:
    return b"".join(xxhash.xxh3_64_digest(kv[block].numpy().tobytes()) for block in block_ids)


@pytest.mark.parametrize(
    "num_words",
    [31, 257, *(pytest.param(words, marks=pytest.mark.triton) for words in (*WORDS, 1536, 4100))],
)
def test_kernels_hash_as_xxh3(num_words: int) -> None:
    require_triton()
    kv = drawn(num_words)
    hashes = interpreted_parts().make_block_hashes(kv)
    assert hashes is not None

    found = hashes(torch.tensor(IDS))

    assert found.numpy().astype(">i8").tobytes() == expected(kv, IDS)


@pytest.mark.parametrize("num_bytes", [240, 1052])
def test_kernels_do_not_hash_blocks_of_other_sizes(num_bytes: int) -> None:
    """Small ones are hashed in other ways, and words of others are not aligned."""
    require_triton()
    kv = torch.zeros(2, num_bytes, dtype=torch.uint8)

    assert interpreted_parts().make_block_hashes(kv) is None


@pytest.mark.parametrize("has_kernels", [True, False])
def test_blocks_of_a_device_are_hashed_after_all_work_launched_so_far(has_kernels: bool) -> None:
    require_triton()
    kv, make_hashes = drawn(40), None
    if has_kernels:
        make_hashes = interpreted_parts().make_block_hashes
    with FakeDevice() as device, kernels_on(device):
        on_device = torch.zeros(kv.shape, dtype=kv.dtype, device=PLACE)
        blocks = KvBlocks(
            on_device, device, None if make_hashes is None else make_hashes(on_device)
        )
        device.drain()
        on_device.copy_(kv)
        awaited = blocks.hash(IDS)
        on_device.zero_()  # of a later owner

        assert awaited() == expected(kv, IDS)


def test_kernels_move_only_hashes_to_the_host_and_wait_when_they_are_read() -> None:
    require_triton()
    with FakeDevice() as device, kernels_on(device):
        on_device = torch.zeros(5, 1, 40, dtype=torch.int64, device=PLACE)
        blocks = KvBlocks(on_device, device, interpreted_parts().make_block_hashes(on_device))
        device.drain()
        device.counts.synchronizations.clear()
        device.counts.copies_out.clear()

        awaited = [blocks.hash(IDS) for _ in range(2)]
        num_waits_before = len(device.counts.synchronizations)
        hashes = [each() for each in awaited]

    assert hashes[0] == hashes[1] == expected(torch.zeros(5, 40, dtype=torch.int64), IDS)
    assert num_waits_before == 0
    assert device.counts.copies_out == ["runner/attention/kv_blocks.py:hash"] * 2


def test_a_digest_is_the_hash_of_the_blocks_hashes_in_order() -> None:
    kv = drawn(40)
    digest = BlockDigest(hash_region(Region(kv.data_ptr(), len(kv), kv[0].nbytes)))

    for part in (IDS[:2], IDS[2:]):
        digest.add(part)

    first, whole = (xxhash.xxh3_64_intdigest(expected(kv, ids)) for ids in (IDS[:2], IDS))
    assert (digest.value_after(2), digest.value_after(3), digest.value()) == (first, None, whole)


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_outside_the_region_is_not_hashed(block: int) -> None:
    kv = drawn(40)
    hash_blocks = hash_region(Region(kv.data_ptr(), len(kv), kv[0].nbytes))

    with pytest.raises(ValueError, match="outside a region of 5 blocks"):
        hash_blocks([BlockId(0), BlockId(block)])
