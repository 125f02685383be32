"""Tiers of KV below the KV cache of a node, as its built-in KV connector."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from baton.core.errors import InvalidConfig
from baton.engine.plan import Plan
from baton.engine.runner.host_memory import huge_page_memory
from baton.engine.runner.kernels.native_copies import fastest_copies
from baton.engine.step_observer import StepObserver
from baton.kv_transfer.kv_connector import KvConnectorContext
from baton.kv_transfer.tiers.block_memory import BlockMemory
from baton.kv_transfer.tiers.copy_pace import CopyPace
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.folder_checks import check_folder
from baton.kv_transfer.tiers.stores.object_store import ObjectStore
from baton.kv_transfer.tiers.stores.objects import open_bucket
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node.kv.tiers_config import parse_tiers


def make_tiers(context: KvConnectorContext) -> TieredKv:
    """Make the tiers of a node. Raises InvalidConfig if they cannot work."""
    config = parse_tiers(context.config)
    fingerprint, block_bytes = context.fingerprint, context.block_bytes
    share = config.tenant_share
    if context.device != "cpu":
        raise InvalidConfig("--kv-host-memory: blocks are copied on the CPU only")
    num_blocks = config.host_bytes // block_bytes
    if not num_blocks:
        raise InvalidConfig(
            f"--kv-host-memory is {config.host_bytes} bytes; a block takes {block_bytes}"
        )
    memory = huge_page_memory(num_blocks * block_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    host = HostTier(BlockMemory(address, num_blocks, block_bytes), memory, share)
    files, objects = None, None
    if config.folder:
        files = FileStore(config.folder, fingerprint, block_bytes, config.folder_bytes, share)
    if config.object_store:
        bucket = open_bucket(config.object_store)
        objects = ObjectStore(bucket, fingerprint, block_bytes, config.object_store_bytes, share)
    return TieredKv(
        BlockMemory(context.address, context.num_blocks, block_bytes),
        host,
        files,
        objects,
        copy=fastest_copies(block_bytes),
        wake=context.wake,
    )


def check_tiers(given: Mapping[str, object]) -> None:
    """Raise InvalidConfig for settings that cannot work with any model."""
    config = parse_tiers(given)
    if config.folder:
        check_folder(config.folder)
    if config.object_store:
        open_bucket(config.object_store)


class CopyPacing(StepObserver):
    """Reports to the tiers before each step whether requests decode in it."""

    def __init__(self, pace: CopyPace) -> None:
        self._pace = pace

    def note_plan(self, plan: Plan, now_s: float) -> None:
        num_tokens = sum(plan.num_scheduled_tokens.values())
        self._pace.set_decoding(num_tokens > plan.num_prompt_tokens)
