"""Blocks of a runner's KV cache as the KV worker accesses them: hashed, copied and converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from mmap import mmap

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton.core.ids import BlockId
from baton.engine.runner.attention.byte_kv import NUMBERS, quantize, scale_bytes
from baton.engine.runner.device.block_copies import BlockCopies
from baton.engine.runner.device.device import CopyStream, Device
from baton.engine.runner.device.step_inputs import StepInputs, make_inputs
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.layout import KvLayout, KvPacking, StagedRun
from baton.kv_transfer.protocol.digest import HASH_BYTES, AwaitHashes
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.transports.base import LayerRange

READ_CHUNK_BLOCKS = 32


# Launches the xxh3-64 hashes of these blocks where they are. Returns their bits as int64.
BlockHashes = Callable[[Tensor], Tensor]
# Returns None if there are no kernels that can hash blocks of this cache.
MakeBlockHashes = Callable[[Tensor], BlockHashes | None]
# Tokens whose numbers are converted at a time, so that temporary tensors stay small.
MAX_TOKENS_AT_ONCE = 512
PAIR = 2  # numbers that one instruction of AMX multiplies and adds
COLUMNS = 16  # of a tile


def no_block_hashes(_: Tensor) -> BlockHashes | None:
    return None


class KvBlocks:
    """On the CPU the KV worker reads the blocks itself, and only converts others into them."""

    def __init__(
        self,
        kv: Tensor,
        device: Device,
        hashes: BlockHashes | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """Without `hashes`, blocks are copied to the host to be hashed. See `write_converted`."""
        self.kv = kv
        self._scales = scales
        self._device = device
        self._hashes = hashes
        self._copies_by_parts: dict[int, BlockCopies] = {}
        self._stream: CopyStream | None = None  # made at the first copy

    @cached_property
    def _inputs(self) -> StepInputs:
        """Ids of blocks. Most runners never need their memory on the device."""
        return make_inputs(self._device)

    def close(self) -> None:
        """Wait for all copies, and release the pinned memory."""
        for copies in self._copies_by_parts.values():
            copies.close()

    def read(self, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
        """Yield the bytes of these blocks in order, copied after all work launched so far."""
        for start in range(0, len(block_ids), READ_CHUNK_BLOCKS):
            ids = torch.tensor(block_ids[start : start + READ_CHUNK_BLOCKS])
            copied = self.kv[ids.to(self.kv.device)].flatten().view(torch.uint8).cpu()
            yield copied.numpy().data

    def hash(self, block_ids: Sequence[BlockId]) -> AwaitHashes:
        """Launch the hashes of these blocks after all work launched so far. See `HashBlocks`."""
        if self._hashes is None or not block_ids:
            hashes = b"".join(self._hash_copies(block_ids))
            return lambda: hashes
        self._inputs.begin()
        ids = self._inputs.put(np.array(block_ids, dtype=np.int64))
        self._inputs.send()
        host = self._device.pin(HASH_BYTES * len(block_ids)).view(torch.int64)
        host.copy_(self._hashes(ids), non_blocking=True)
        fence = self._device.record()

        def await_hashes() -> bytes:
            fence.wait()
            return host.numpy().astype(">i8").tobytes()

        return await_hashes

    def pin(self, memory: mmap) -> None:
        """Pin host memory for copies, until `unpin` or `close`. Any thread may call both."""
        self._copies(num_parts=1).pin(memory)

    def unpin(self, memory: mmap) -> None:
        """End a pin. All fences after reads and writes of the memory must have passed."""
        self._copies(num_parts=1).unpin(memory)

    def copy_out(
        self,
        target: Region,
        block_ids: Sequence[BlockId],
        layers: LayerRange,
        slots: Sequence[BlockId],
    ) -> Fence:
        """Begin to copy layers of blocks into the same layers of blocks in pinned memory.

        They are read at once: a pass that writes them must be over.
        """
        memory = BlockMemory(
            target.base, target.num_blocks * layers.of, target.block_bytes // layers.of
        )
        places = layers.places(block_ids).tolist()
        into = layers.places(slots).tolist()
        return self._copies(layers.of).copy_out(places, memory, into)

    def convert(self, memory: mmap, staged: StagedRun) -> Fence:
        """Convert blocks of a peer, in staging memory, into those of this cache.

        The memory is read until the fence has passed.
        """
        if not staged.num_blocks:
            return PASSED
        source, count = staged.source, staged.num_blocks * staged.source.block_bytes
        own = torch.frombuffer(memory, dtype=torch.uint8, offset=staged.offset, count=count)
        if source == staged.target:
            area = BlockMemory(own.data_ptr(), staged.num_blocks, source.block_bytes)
            return self._copies(num_parts=1).copy_in(
                area, range(staged.num_blocks), staged.block_ids
            )
        sent = own.to(self._device.torch_device, non_blocking=True)
        blocks = view_blocks(sent, source)
        self._inputs.begin()
        targets = self._inputs.put(np.array(staged.block_ids, dtype=np.int64))
        self._inputs.send()
        write_converted(blocks, self.kv, targets, staged.first_token, self._scales)
        return self._device.record()

    def _hash_copies(self, block_ids: Sequence[BlockId]) -> Iterator[bytes]:
        size = self.kv[0].numel() * self.kv.element_size()
        for copied in self.read(block_ids):
            for start in range(0, len(copied), size):
                yield xxhash.xxh3_64_digest(copied[start : start + size])

    def _copies(self, num_parts: int) -> BlockCopies:
        """Return copies of the blocks split into `num_parts`, all on the same stream."""
        copies = self._copies_by_parts.get(num_parts)
        if copies is None:
            self._stream = self._stream or self._device.make_copy_stream()
            if self._stream is None:
                raise RuntimeError("memory of the CPU is not copied")
            parts = self.kv.flatten(1).view(len(self.kv) * num_parts, -1)
            made = BlockCopies(parts, self._stream, self._device.record)
            copies = self._copies_by_parts.setdefault(num_parts, made)  # of the first thread
        return copies


def view_blocks(memory: Tensor, layout: KvLayout) -> Tensor:
    """Return bytes as blocks, [blocks, layers, tensors, kv_heads, tokens, slot].

    Blocks of vLLM on CPUs are packed for its kernels.
    """
    numbers = memory.view(NUMBERS.get(layout.packing) or getattr(torch, layout.dtype))
    layers, heads = layout.num_layers, layout.num_kv_heads
    size, dim = layout.block_size, layout.head_dim
    if layout.packing in (KvPacking.PLAIN, *NUMBERS):
        slot = dim + scale_bytes(numbers.dtype)
        return numbers.view(-1, layers, layout.num_tensors, heads, size, slot)
    if layout.packing is KvPacking.VLLM:
        return numbers.view(-1, layers, heads, size, 2, dim).permute(0, 1, 4, 2, 3, 5)
    halves = numbers.view(-1, layers, heads, 2, size * dim)
    unpack_keys, unpack_values = UNPACK[layout.packing]
    keys, values = halves[:, :, :, 0].flatten(0, 2), halves[:, :, :, 1].flatten(0, 2)
    unpacked = unpack_keys(keys, size, dim), unpack_values(values, size, dim)
    return torch.stack([each.reshape(-1, layers, heads, size, dim) for each in unpacked], dim=2)


def _vec_keys(keys: Tensor, size: int, dim: int) -> Tensor:
    return keys.view(-1, dim, size).transpose(1, 2)


def _vec_values(values: Tensor, size: int, dim: int) -> Tensor:
    return values.view(-1, size, dim)


def _amx_keys(keys: Tensor, size: int, dim: int) -> Tensor:
    tiles = keys.view(-1, size // COLUMNS, dim // PAIR, COLUMNS, PAIR)
    return tiles.permute(0, 1, 3, 2, 4).reshape(-1, size, dim)


def _amx_values(values: Tensor, size: int, dim: int) -> Tensor:
    tiles = values.view(-1, dim // COLUMNS, size // PAIR, COLUMNS, PAIR)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, size, dim)


Unpack = Callable[[Tensor, int, int], Tensor]
UNPACK: Mapping[KvPacking, tuple[Unpack, Unpack]] = {
    KvPacking.VLLM_VEC: (_vec_keys, _vec_values),
    KvPacking.VLLM_AMX: (_amx_keys, _amx_values),
}


def write_converted(
    staged: Tensor, kv: Tensor, block_ids: Tensor, first_token: int, scales: Tensor | None = None
) -> None:
    """Write the tokens of `staged` from `first_token` on into blocks of `kv`, in order.

    Both are [blocks, layers, tensors, kv_heads, block_size, slot]. The last block is filled as far
    as there are tokens. `scales` are those of FP8, [layers, tensors, kv_heads, 1]. Of the layers of
    a draft head, those that only `staged` has are left out, and those that only `kv` has are zero.
    """
    num_layers = min(kv.shape[1], staged.shape[1])
    if num_layers < kv.shape[1]:
        kv[block_ids, num_layers:] = 0
    staged, kv = staged[:, :num_layers], kv[:, :num_layers]
    scales = None if scales is None else scales[:num_layers]
    size, staged_size = kv.shape[4], staged.shape[4]
    at_once = max(1, MAX_TOKENS_AT_ONCE // size)
    for first in range(0, len(block_ids), at_once):
        targets = block_ids[first : first + at_once]
        begin = first_token + first * size
        end = min(begin + len(targets) * size, staged.shape[0] * staged_size)
        some = staged[begin // staged_size : -(-end // staged_size)]
        skipped = begin % staged_size
        by_token = some.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        tokens = by_token[skipped : skipped + end - begin]
        if staged.dtype != kv.dtype:
            tokens = quantize(tokens, kv.dtype, scales)
        _write(tokens, kv, targets)


def _write(tokens: Tensor, kv: Tensor, targets: Tensor) -> None:
    """Write slots, [tokens, layers, tensors, kv_heads, slot]."""
    size = kv.shape[4]
    num_whole = len(tokens) // size
    whole = tokens[: num_whole * size].unflatten(0, (num_whole, size))
    kv[targets[:num_whole]] = whole.permute(0, 2, 3, 4, 1, 5)
    rest = tokens[num_whole * size :]
    if len(rest):
        kv[targets[num_whole], :, :, :, : len(rest)] = rest.permute(1, 2, 3, 0, 4)
