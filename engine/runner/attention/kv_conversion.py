"""Conversion of KV blocks of another size or dtype into those of this node."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.runner.attention.int8_kv import quantize
from baton.engine.runner.attention.kv_tensor import scale_bytes
from baton.kv_transfer.protocol.messages import Fingerprint

# Tokens whose numbers are converted at a time, so that temporary tensors stay small.
MAX_TOKENS_AT_ONCE = 512


def view_blocks(memory: Tensor, kv: Tensor, layout: Fingerprint) -> Tensor:
    """View bytes as blocks of another layout, [blocks, layers, tensors, kv_heads, size, slot]."""
    dtype = torch.int8 if layout.dtype.startswith("int8") else getattr(torch, layout.dtype)
    shape = (*kv.shape[1:4], layout.block_size, layout.head_dim + scale_bytes(dtype))
    return memory.view(dtype).view(-1, *shape)


def write_converted(staged: Tensor, kv: Tensor, block_ids: Tensor, first_token: int) -> None:
    """Write the tokens of `staged` from `first_token` on into blocks of `kv`, in order.

    Both are [blocks, layers, tensors, kv_heads, block_size, slot]. The last block is filled as far
    as there are tokens.
    """
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
        if kv.dtype is torch.int8 and staged.dtype is not torch.int8:
            tokens = quantize(tokens)
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
