"""Bandwidth of loads from host memory, next to memcpy of the same blocks in the same process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.calls import fastest_copies
from baton.kv_transfer.tiers.bandwidth import HostRound, measure_host
from baton.kv_transfer.tiers.kv_access import BlockMemory

MEMORY_BYTES = 256 << 20
BLOCK_BYTES = (32 << 10, 256 << 10, 1792 << 10)  # the last one: 16 tokens of Qwen3-0.6B


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Medians of the rounds with blocks of one size, which copy the same blocks in three ways."""

    block_kib: int
    memcpy_gb_per_s: float
    load_gb_per_s: float
    store_gb_per_s: float
    load_share: float  # of memcpy
    store_share: float


def run(num_rounds: int) -> Iterator[CopyRow]:
    for block_bytes in BLOCK_BYTES:
        yield _row(block_bytes, num_rounds)


def _row(block_bytes: int, num_rounds: int) -> CopyRow:
    num_blocks = MEMORY_BYTES // block_bytes
    owners = [huge_page_memory(num_blocks * block_bytes) for _ in range(2)]
    kv, host = (
        _blocks(ctypes.c_char.from_buffer(each), num_blocks, block_bytes) for each in owners
    )
    copy = fastest_copies(block_bytes)
    measure_host(kv, host, copy, perf_counter)  # maps the memory
    rounds = [measure_host(kv, host, copy, perf_counter, seed) for seed in range(num_rounds)]

    def rate(seconds: Callable[[HostRound], float]) -> float:
        return median(each.num_bytes / seconds(each) / 1e9 for each in rounds)

    return CopyRow(
        block_bytes >> 10,
        rate(lambda each: each.memcpy_s),
        rate(lambda each: each.load_s),
        rate(lambda each: each.store_s),
        median(each.memcpy_s / each.load_s for each in rounds),
        median(each.memcpy_s / each.store_s for each in rounds),
    )


def _blocks(start: ctypes.c_char, num_blocks: int, block_bytes: int) -> BlockMemory:
    address = ctypes.addressof(start)
    ctypes.memset(address, 1, num_blocks * block_bytes)
    return BlockMemory(address, num_blocks, block_bytes)
