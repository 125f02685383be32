"""Conversion of KV blocks of another layout into those of this node.

Blocks of vLLM on CPUs are packed for its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from baton.engine.runner.attention.byte_kv import NUMBERS, quantize, scale_bytes
from baton.kv_transfer.layout import KvLayout, KvPacking

# Tokens whose numbers are converted at a time, so that temporary tensors stay small.
MAX_TOKENS_AT_ONCE = 512
PAIR = 2  # numbers that one instruction of AMX multiplies and adds
COLUMNS = 16  # of a tile


def view_blocks(memory: Tensor, layout: KvLayout) -> Tensor:
    """Return bytes as blocks, [blocks, layers, tensors, kv_heads, tokens, slot]."""
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
