"""Copies of KV blocks with digests by the kernel library, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from baton.engine.runner.kernels.abi import CopyArgs, Struct, load_library
from baton.engine.runner.kernels.build import best_variant, built, cpu_features
from baton.kv_transfer.tiers.block_memory import DIGEST_BYTES, BlockMemory, CopyBlocks, copy_blocks

MIN_BLOCK_BYTES = 241  # the kernel has no digests of fewer bytes


def fastest_copies(block_bytes: int) -> CopyBlocks:
    """Return the kernel if its library is built already; otherwise what needs none."""
    path = built(best_variant(cpu_features()))
    if path is None or block_bytes < MIN_BLOCK_BYTES:
        return copy_blocks
    return NativeCopies(load_library(path).baton_copy_blocks)


class NativeCopies:
    """Implements CopyBlocks. One call of the kernel copies all blocks."""

    def __init__(self, kernel: Callable[[Struct], None]) -> None:
        self._kernel = kernel

    def __call__(
        self,
        source: BlockMemory,
        blocks: Sequence[int],
        target: BlockMemory,
        into: Sequence[int],
    ) -> list[bytes]:
        sources, targets = source.addresses_of(blocks), target.addresses_of(into)
        digests = np.empty((len(sources), DIGEST_BYTES), np.uint8)
        self._kernel(
            CopyArgs(
                src_addresses=sources.ctypes.data,
                dst_addresses=targets.ctypes.data,
                digests=digests.ctypes.data,
                num_blocks=len(sources),
                block_bytes=source.block_bytes,
            )
        )
        return [digest.tobytes() for digest in digests]
