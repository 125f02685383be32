"""Automatic size of the KV cache (`--kv-cache-memory auto`). Pure.

On the CPU it is a share of the memory that is free after the weights are loaded. That is bounded by
the limits of the container, and the rest is left for activations, other processes and the page
cache; KV pages are allocated when they are first written, not at start. On a GPU it is what
weights, the largest step and graphs leave of the share that the node may use. Both leave memory
free for LoRA adapters, which are loaded later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from baton.core.errors import InvalidConfig
from baton.core.units import format_bytes
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.config import RunnerConfig

if TYPE_CHECKING:
    from baton.engine.runner.device.device import MemoryProfile

CPU_SHARE = 0.5  # divided by the nodes that share the machine
CPU_NODES_PER_MACHINE = 2  # a prefill and a decode node
MIN_BYTES = 256 << 20


class CacheShape(NamedTuple):
    """Shape of a KV cache of any number of blocks."""

    block_bytes: int
    max_model_len: int
    layout: CacheLayout
    adapter_bytes: int = 0  # memory that is left free for adapters


def auto_kv_bytes(config: RunnerConfig, free_bytes: int, cache: CacheShape) -> int:
    """Return the node's share of a CPU's `free_bytes` without the adapters of all nodes, clipped.

    It is at least 256 MiB or half of the free memory, whichever is smaller, and at most the KV of
    `max_num_seqs` sequences of `max_model_len` tokens.
    """
    num_nodes = config.nodes_per_machine or CPU_NODES_PER_MACHINE
    floor_bytes = min(MIN_BYTES, free_bytes // 2)
    left_bytes = free_bytes - num_nodes * cache.adapter_bytes
    share_bytes = max(int(left_bytes * CPU_SHARE / num_nodes), floor_bytes)
    return min(share_bytes, _most_bytes(config, cache))


def profiled_kv_bytes(config: RunnerConfig, memory: MemoryProfile, cache: CacheShape) -> int:
    """Return what is left of the node's share of a GPU, clipped. Raises InvalidConfig if nothing.

    What other processes use counts as used, but not what other nodes will use.
    """
    utilization = config.gpu_memory_utilization
    share_bytes = int(memory.total_bytes * utilization) // (config.nodes_per_machine or 1)
    reserve_bytes = int(memory.total_bytes * (1 - utilization))
    left_bytes = min(share_bytes - memory.own_bytes, memory.free_bytes - reserve_bytes)
    left_bytes -= memory.run_bytes + cache.adapter_bytes
    if left_bytes < cache.block_bytes:
        of_adapters, remedy = "", ""
        if cache.adapter_bytes:
            of_adapters = f"its adapters {format_bytes(cache.adapter_bytes)}, "
            remedy = "max-cpu-loras, max-lora-rank, "
        raise InvalidConfig(
            f"no memory is left for the KV cache: the node may use {format_bytes(share_bytes)} of "
            f"the GPU, its weights take {format_bytes(memory.own_bytes)}, {of_adapters}its "
            f"largest step and graphs {format_bytes(memory.run_bytes)}, and "
            f"{format_bytes(memory.free_bytes)} are free: lower {remedy}--max-num-batched-tokens "
            "or --max-num-seqs, or raise gpu-memory-utilization"
        )
    return min(left_bytes, _most_bytes(config, cache))


def _most_bytes(config: RunnerConfig, cache: CacheShape) -> int:
    """Return the size of the KV of a full batch of the longest sequences."""
    num_blocks_per_sequence = cache.layout.num_blocks(-(-cache.max_model_len // config.block_size))
    return config.max_num_seqs * num_blocks_per_sequence * cache.block_bytes
