"""Automatic size of the KV cache (`--kv-cache-memory auto`). Pure.

The size is a share of the memory that is free after the weights are loaded. On the CPU, free memory
is bounded by the limits of the container, and the rest is left for activations, other processes and
the page cache; KV pages are allocated when they are first written, not at start.
"""

from __future__ import annotations

from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.config import RunnerConfig

CPU_SHARE = 0.5  # divided by the nodes that share the machine
GPU_SHARE = 0.8  # divided by the nodes that share the device; the rest is for activations
CPU_NODES_PER_MACHINE = 2  # a prefill and a decode node
MIN_BYTES = 256 << 20


def kv_share(config: RunnerConfig) -> float:
    """Return the share of free memory that one node takes."""
    if config.device == "cpu":
        return CPU_SHARE / (config.nodes_per_machine or CPU_NODES_PER_MACHINE)
    return GPU_SHARE / (config.nodes_per_machine or 1)


def auto_kv_bytes(
    config: RunnerConfig,
    free_bytes: int,
    block_bytes: int,
    max_model_len: int,
    layout: CacheLayout,
) -> int:
    """Return the node's share of `free_bytes`, clipped.

    It is at least 256 MiB or half of the free memory, whichever is smaller, and at most the KV of
    `max_num_seqs` sequences of `max_model_len` tokens.
    """
    share_bytes = int(free_bytes * kv_share(config))
    floor_bytes = min(MIN_BYTES, free_bytes // 2)
    num_blocks_per_sequence = layout.num_blocks(-(-max_model_len // config.block_size))
    cap_bytes = config.max_num_seqs * num_blocks_per_sequence * block_bytes
    return min(max(share_bytes, floor_bytes), cap_bytes)
