"""Blocks of vLLM servers as keys and values by token; those of CPUs are packed for kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from baton.kv_transfer.foreign.config import KvPacking

PAIR = 2  # numbers that one instruction of AMX multiplies and adds
COLUMNS = 16  # of a tile


def unpack(memory: Tensor, packing: KvPacking, shape: tuple[int, int, int, int]) -> Tensor:
    """Return keys and values, [blocks, layers, 2, heads, tokens, dim].

    `memory` holds blocks of all layers, and `shape` is (layers, heads, tokens, dim).
    """
    layers, heads, size, dim = shape
    if packing is KvPacking.PLAIN:
        # A token's key is followed by its value.
        return memory.view(-1, layers, heads, size, 2, dim).permute(0, 1, 4, 2, 3, 5)
    halves = memory.view(-1, layers, heads, 2, size * dim)
    unpack_keys, unpack_values = UNPACK[packing]
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
    KvPacking.VEC: (_vec_keys, _vec_values),
    KvPacking.AMX: (_amx_keys, _amx_values),
}
