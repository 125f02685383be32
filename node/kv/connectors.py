"""KV connector of a node, found by entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from baton.core.errors import InvalidConfig
from baton.engine.runner.device.host_memory import free_host_bytes
from baton.engine.runner.kv_budget import CPU_NODES_PER_MACHINE
from baton.engine.runner.loaded_runner import CachingRunner, LoadedRunner, has_kv_cache
from baton.kv_transfer.external_kv import FILE, KV, OBJECT, TIERS
from baton.kv_transfer.kv_connector import (
    GuardedConnector,
    KvConnector,
    KvConnectorContext,
    KvConnectorFactory,
)
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node.options import NodeOptions

GROUP = "baton.kv_connectors"
BUILT_IN = (EntryPoint("tiers", "baton.node.kv.tiers:make_tiers", GROUP),)


def make_connector(
    options: NodeOptions, identity: Identity, runner: LoadedRunner, wake: Callable[[], None]
) -> GuardedConnector | None:
    """Return the connector that the options name, or None. Raises InvalidConfig."""
    chosen = options.chosen_connector
    if chosen is None or not has_kv_cache(runner):
        return None
    memory = runner.kv_memory
    context = KvConnectorContext(
        address=memory.address,
        num_blocks=memory.num_blocks,
        block_bytes=memory.block_bytes,
        device=memory.device,
        device_blocks=runner.make_block_copies(),
        fingerprint=repr(identity.fingerprint),
        wake=wake,
        config=chosen.config,
        spare_bytes=_spare_bytes(options, runner),
    )
    return GuardedConnector(chosen.name, load_connector(chosen.name, context))


def _spare_bytes(options: NodeOptions, runner: CachingRunner) -> int:
    """Return what the node leaves of its part of host memory, with a full KV cache and adapters."""
    is_cpu = runner.kv_memory.device == "cpu"
    num_nodes = options.runner.nodes_per_machine or (CPU_NODES_PER_MACHINE if is_cpu else 1)
    own_bytes = 0
    if is_cpu:
        adapter_bytes = 0 if runner.adapters is None else runner.adapters.max_bytes
        own_bytes = runner.kv_memory.num_bytes + adapter_bytes
    return max(0, free_host_bytes() // num_nodes - own_bytes)


def tiers_in(connector: GuardedConnector | None) -> TieredKv | None:
    """Return the connector if it is the built-in one."""
    inner = None if connector is None else connector.connector
    return inner if isinstance(inner, TieredKv) else None


def shared_tiers_of(connector: GuardedConnector | None) -> frozenset[str]:
    """Return the tiers of a node that other nodes use, too. Those of other packages may be."""
    if connector is None:
        return frozenset()
    tiers = tiers_in(connector)
    if tiers is None:
        return frozenset(TIERS) - {KV}
    return frozenset(tier.name for tier in tiers.status()) & {FILE, OBJECT}


def load_connector(name: str, context: KvConnectorContext) -> KvConnector:
    """Make the connector that is registered under this name. Raises InvalidConfig."""
    entry = find_connector(name)
    try:
        factory: KvConnectorFactory = entry.load()
        return factory(context)
    except InvalidConfig:
        raise
    except Exception as error:
        raise InvalidConfig(
            f"--kv-connector {name}: cannot make {entry.value}: {type(error).__name__}: {error}"
        ) from error


def find_connector(name: str) -> EntryPoint:
    """Return the entry point that is registered under this name. Raises InvalidConfig."""
    installed = {entry.name: entry for entry in BUILT_IN}
    if name not in installed:  # reading the metadata of all packages takes milliseconds
        installed = {entry.name: entry for entry in entry_points(group=GROUP)} | installed
    if name not in installed:
        raise InvalidConfig(
            f"--kv-connector {name}: no installed package has it under the entry point group "
            f"{GROUP}; installed: {', '.join(sorted(installed))}"
        )
    return installed[name]
