"""Tiers of KV below the KV cache of a node, as its built-in KV connector."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from mmap import mmap

from baton.core.errors import InvalidConfig
from baton.engine.plan import Plan, StepObserver
from baton.engine.runner.device.host_memory import free_host_bytes, huge_page_memory
from baton.engine.runner.kernels.calls import fastest_copies
from baton.kv_transfer.kv_connector import KvConnectorContext
from baton.kv_transfer.tiers.copy_pace import CopyPace
from baton.kv_transfer.tiers.device_kv_access import DeviceKvAccess
from baton.kv_transfer.tiers.host_growth import MIN_FREE_SHARE, HostGrowth, auto_host_bytes
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import BlockMemory, CpuKvAccess, KvAccess
from baton.kv_transfer.tiers.stores.block_store import StoreKind
from baton.kv_transfer.tiers.stores.store_kinds import STORE_KINDS
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node.kv.tiers_config import TiersConfig, parse_tiers


def make_tiers(context: KvConnectorContext) -> TieredKv:
    """Make the tiers of a node. Raises InvalidConfig if they cannot work."""
    config = parse_tiers(context.config)
    fingerprint, block_bytes = context.fingerprint, context.block_bytes
    share, host_bytes = config.tenant_share, config.host_bytes
    if host_bytes is None:
        kv_bytes = context.num_blocks * block_bytes
        host_bytes = max(block_bytes, auto_host_bytes(context.spare_bytes, kv_bytes))
    num_blocks = host_bytes // block_bytes
    if not num_blocks:
        raise InvalidConfig(f"--kv-host-memory is {host_bytes} bytes; a block takes {block_bytes}")
    chosen = _chosen_stores(config)
    num_parallel = sum(kind.num_parallel for kind, _, _ in chosen)
    num_reads = 0 if context.device_blocks is None else num_parallel
    memory = huge_page_memory((num_blocks + num_reads) * block_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    blocks = BlockMemory(address, num_blocks, block_bytes)
    host = HostTier(blocks, memory, share, growth=_make_growth(context, config, blocks))
    stores = [
        (kind, kind.open(place, fingerprint, block_bytes, max_bytes, share))
        for kind, place, max_bytes in chosen
    ]
    staging = BlockMemory(address + num_blocks * block_bytes, num_reads, block_bytes)
    return TieredKv(_make_kv_access(context, memory, staging), host, stores, wake=context.wake)


def _make_growth(
    context: KvConnectorContext, config: TiersConfig, memory: BlockMemory
) -> HostGrowth:
    """Let the tier grow in steps; on a device all of it is pinned at once."""
    if context.device_blocks is not None:
        return HostGrowth(memory, step_bytes=memory.num_blocks * memory.block_bytes)
    if config.host_bytes is not None:
        return HostGrowth(memory)
    min_free_bytes = free_host_bytes() * MIN_FREE_SHARE
    return HostGrowth(memory, lambda: free_host_bytes() >= min_free_bytes)


def _make_kv_access(context: KvConnectorContext, memory: mmap, staging: BlockMemory) -> KvAccess:
    """Return the blocks of the KV cache. `memory` is that of the host tier and of `staging`."""
    device = context.device_blocks
    if device is None:
        kv = BlockMemory(context.address, context.num_blocks, context.block_bytes)
        return CpuKvAccess(kv, fastest_copies(context.block_bytes))
    device.pin(memory)
    return DeviceKvAccess(device, staging)


def check_tiers(given: Mapping[str, object]) -> None:
    """Raise InvalidConfig for settings that cannot work with any model."""
    for kind, place, _ in _chosen_stores(parse_tiers(given)):
        kind.check(place)


def _chosen_stores(config: TiersConfig) -> list[tuple[StoreKind, str, int]]:
    """Return the kinds of stores that the settings name, each with its place and size."""
    places = config.places
    return [(kind, *places[kind.name]) for kind in STORE_KINDS if kind.name in places]


class CopyPacing(StepObserver):
    """Reports to the tiers before each step whether requests decode in it."""

    def __init__(self, pace: CopyPace) -> None:
        self._pace = pace

    def note_plan(self, plan: Plan, now_s: float) -> None:
        num_tokens = sum(plan.num_scheduled_tokens.values())
        self._pace.set_decoding(num_tokens > plan.num_prompt_tokens)
