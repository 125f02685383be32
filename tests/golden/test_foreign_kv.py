"""KV blocks as vLLM's own kernel packs them, and what becomes of them in Baton's KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import BlockId
from baton.engine.runner.attention.byte_kv import dequantize
from baton.engine.runner.attention.kv_blocks import KvBlocks, view_blocks
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.kv_transfer.foreign_kv import ForeignPull, ForeignPullId
from baton.kv_transfer.layout import KvLayout, KvPacking, layout_map
from baton.node.kv.foreign.metadata import ForeignBlocks
from baton.node.kv.foreign.session import Bay, RunRead, min_run_blocks
from tools.vllm_kv_bytes import DIM, HEADS, NUM_BLOCKS, SIZE

RECORDED = Path(__file__).parent / "vllm"
NUM_TOKENS = NUM_BLOCKS * SIZE
LAYOUT = KvLayout("bfloat16", SIZE, 1, HEADS, DIM)  # of this node


def tokens() -> Tensor:
    """Return what the recording script wrote: keys and values, [2, tokens, heads, dim]."""
    places = torch.arange(2 * NUM_TOKENS * HEADS * DIM, dtype=torch.int16)
    return places.view(2, NUM_TOKENS, HEADS, DIM)


def blocks_of(numbers: Tensor) -> Tensor:
    """Return keys and values in blocks, [blocks, layers, 2, heads, tokens, dim]."""
    blocks = numbers.view(2, NUM_BLOCKS, SIZE, HEADS, DIM)
    return blocks.permute(1, 0, 3, 2, 4).unsqueeze(1)


@pytest.mark.parametrize("packing", [KvPacking.VLLM_VEC, KvPacking.VLLM_AMX])
def test_blocks_of_vllms_kernel_are_unpacked(packing: KvPacking) -> None:
    """`amx` is recorded from the same function, compiled from vLLM 0.32.0's sources."""
    recorded = bytearray((RECORDED / f"{packing.value}.bin").read_bytes())
    memory = torch.frombuffer(recorded, dtype=torch.uint8)
    unpacked = view_blocks(memory, replace(LAYOUT, packing=packing))
    assert torch.equal(unpacked.view(torch.int16), blocks_of(tokens()))


def test_plain_blocks_are_unpacked() -> None:
    keys, values = blocks_of(tokens()).unbind(2)
    memory = torch.cat((keys, values), dim=-1).flatten().view(torch.uint8)
    unpacked = view_blocks(memory, replace(LAYOUT, packing=KvPacking.VLLM))
    assert torch.equal(unpacked.view(torch.int16), blocks_of(tokens()))


@pytest.mark.parametrize("size", [8, 16, 32, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_of_another_size_enter_the_kv_cache(size: int, dtype: torch.dtype) -> None:
    num_places = NUM_TOKENS // size
    slot = DIM + 2 * (dtype is torch.int8)
    kv = torch.zeros(num_places + 3, 1, 2, HEADS, size, slot, dtype=dtype)
    target_ids = tuple(BlockId(index) for index in range(num_places + 2, 2, -1))
    foreign = ForeignBlocks(
        engine_id="e",
        agent_metadata=b"",
        layer_addresses=(1,),
        layer_strides=(1,),
        num_blocks=NUM_BLOCKS,
        layout=replace(LAYOUT, packing=KvPacking.VLLM_VEC),
        device_id=0,
        is_on_cpu=True,
    )
    source = ForeignKv("h", 1, "e", "r", tuple(range(NUM_BLOCKS)), NUM_TOKENS)
    pull = ForeignPull(ForeignPullId(1), source, 0.0, tuple(range(num_places)), target_ids)
    memory = huge_page_memory(2 * NUM_BLOCKS * foreign.layout.block_bytes)
    recorded, blocks = (RECORDED / "vec.bin").read_bytes(), KvBlocks(kv, Device())
    is_int8 = dtype is torch.int8
    target = replace(
        LAYOUT, block_size=size, packing=KvPacking.INT8 if is_int8 else KvPacking.PLAIN
    )
    max_blocks = min_run_blocks(size, SIZE)
    for run in layout_map(foreign.layout, target, pull.places, max_blocks=max_blocks):
        offset = bytes_each = foreign.layout.block_bytes  # not at the beginning
        content = b"".join(
            recorded[index * bytes_each : (index + 1) * bytes_each] for index in run.source
        )
        memory[offset : offset + len(content)] = content
        read = RunRead(pull, run, foreign, Bay(memory, offset), lambda _: None)
        assert blocks.convert(memory, read.staged_for(target)).is_passed
    expected = tokens()[:, : num_places * size].view(torch.bfloat16)
    landed = kv[list(target_ids)]
    if dtype is torch.int8:
        landed = dequantize(landed, torch.bfloat16)
    by_token = landed[:, 0].permute(1, 0, 3, 2, 4).reshape(2, -1, HEADS, DIM)
    if dtype is torch.int8:
        largest = expected.float().abs().amax(dim=-1, keepdim=True)
        assert ((by_token.float() - expected.float()).abs() <= largest / 100).all()
    else:
        assert torch.equal(by_token.view(torch.int16), expected.view(torch.int16))
    assert not kv[:3].any()
