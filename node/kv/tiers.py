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
from baton.node.kv.tiers_config import TiersConfig, parse_tiers


def make_tiers(context: KvConnectorContext) -> TieredKv:
    """Make the tiers of a node. Raises InvalidConfig if they cannot work."""
    config = parse_tiers(context.config)
    if context.device != "cpu":
        raise InvalidConfig("--kv-host-memory: blocks are copied on the CPU only")
    num_blocks = config.host_bytes // context.block_bytes
    if not num_blocks:
        raise InvalidConfig(
            f"--kv-host-memory is {config.host_bytes} bytes; a block takes {context.block_bytes}"
        )
    memory = huge_page_memory(num_blocks * context.block_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    host = HostTier(
        BlockMemory(address, num_blocks, context.block_bytes), memory, config.tenant_share
    )
    kv_memory = BlockMemory(context.address, context.num_blocks, context.block_bytes)
    return TieredKv(
        *(kv_memory, host, _make_files(config, context), _make_objects(config, context)),
        copy=fastest_copies(context.block_bytes),
        wake=context.wake,
    )


def check_tiers(given: Mapping[str, object]) -> None:
    """Raise InvalidConfig for settings that cannot work with any model."""
    config = parse_tiers(given)
    if config.folder:
        check_folder(config.folder)
    if config.object_store:
        open_bucket(config.object_store)


def _make_files(config: TiersConfig, context: KvConnectorContext) -> FileStore | None:
    if not config.folder:
        return None
    return FileStore(
        *(config.folder, context.fingerprint, context.block_bytes),
        *(config.folder_bytes, config.tenant_share),
    )


def _make_objects(config: TiersConfig, context: KvConnectorContext) -> ObjectStore | None:
    if not config.object_store:
        return None
    return ObjectStore(
        *(open_bucket(config.object_store), context.fingerprint, context.block_bytes),
        *(config.object_store_bytes, config.tenant_share),
    )


class CopyPacing(StepObserver):
    """Reports to the tiers before each step whether requests decode in it."""

    def __init__(self, pace: CopyPace) -> None:
        self._pace = pace

    def note_plan(self, plan: Plan, now_s: float) -> None:
        num_tokens = sum(plan.num_scheduled_tokens.values())
        self._pace.set_decoding(num_tokens > plan.num_prompt_tokens)
