"""Gauges of a node that are read at each scrape, in addition to its counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from baton.engine.events import SchedulerStats
from baton.engine.runner.device.graphs import EagerCause, GraphSize
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.kv_connector import GuardedConnector
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.kv_transfer.worker import KvCounters, KvTransferWorker
from baton.node.adapters.loader import AdapterCounts
from baton.node.adapters.registry import AdapterRegistry
from baton.node.wiring import NodeComponents
from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import AdaptersInUse, Reading, VllmGauges
from baton.telemetry.metrics.readers import OwnerThreadReader, export_metrics
from baton.telemetry.resource import Process


@contextmanager
def export_node_metrics(process: Process, node: NodeComponents) -> Iterator[None]:
    """Serve the node's metrics until the block ends, if metrics are enabled."""
    metrics = node.metrics
    if metrics is None:
        yield
        return
    facts: Reading = {
        counted.TRANSPORT: {node.options.kv_transport: 1.0},
        counted.RANKS: node.options.runner.tensor_parallel_size,
    }
    read_on_engine = OwnerThreadReader(node.engine.post, partial(_read_on_engine, node))

    def read() -> Reading:
        """Gauges that need no engine are current even while the engine is busy."""
        silence = {counted.SILENCE: node.engine.seconds_since_heartbeat()}
        others = {
            counted.TRACES_LOST: node.tracing.num_lost,
            counted.COLLECTIVES: node.read_collectives_s(),
            **adapter_gauges(node.adapters),
        }
        return {**facts, **silence, **others, **read_on_engine()}

    metrics.registry.register(
        VllmGauges(
            read_on_engine,
            node.scheduler.cache_config.naming.block_size,
            0 if node.adapters is None else node.options.adapters.max_loras,
            partial(_adapters_in_use, node.adapters),
        )
    )
    with export_metrics(node.options.telemetry, process, metrics.registry, read):
        yield


def _read_on_engine(node: NodeComponents) -> Reading:
    gauges = {
        **read_gauges(node.scheduler, node.worker, node.connector),
        counted.PASSES: passes_by_launch(node.num_passes),
    }
    for part in node.parts:
        gauges |= part.read_gauges()
    return gauges


def read_gauges(
    scheduler: Scheduler,
    worker: KvTransferWorker | None,
    connector: GuardedConnector | None = None,
) -> Reading:
    stats, counters = scheduler.stats(), KvCounters() if worker is None else worker.counters()
    return {
        counted.RUNNING: stats.num_running,
        counted.WAITING: {
            "waiting": stats.num_waiting,
            "waiting_for_remote_kvs": stats.num_waiting_for_remote_kvs,
            "waiting_for_fsm": stats.num_waiting_for_fsm,
            "ready": stats.num_ready,
        },
        counted.BLOCKS: blocks_by_state(stats, counters.num_fenced_blocks),
        **_group_gauges(scheduler),
        counted.OPEN_HANDOFFS: {
            "received": stats.num_pending_receives,
            "sent": stats.num_pending_sends,
        },
        counted.PREEMPTIONS: stats.total_preemptions,
        counted.PREFIX_TOKENS: {
            "asked": stats.total_prefix_query_tokens,
            "found": stats.total_prefix_hit_tokens,
        },
        counted.SAMPLED_TOKENS: stats.total_sampled_tokens,
        counted.SPECULATED_TOKENS: {
            "proposed": stats.total_proposed_tokens,
            "accepted": stats.total_accepted_tokens,
        },
        counted.DRAFTS_PROPOSED: _by_position(stats.proposed_by_position),
        counted.DRAFTS_ACCEPTED: _by_position(stats.accepted_by_position),
        counted.PICTURES: {
            "encoded": stats.total_encoded_pictures,
            "found": stats.total_found_pictures,
            "read": stats.total_read_pictures,
        },
        counted.ENCODER_ROWS: stats.num_encoder_rows,
        counted.PULL_BLOCKS: {
            "landed": stats.total_pulled_blocks,
            "failed": stats.total_failed_pull_blocks,
        },
        counted.DIGEST_MISMATCHES: counters.num_digest_mismatches,
        counted.LINKS: {"up": counters.num_linked_peers, "opening": counters.num_linking_peers},
        counted.LINKS_CUT: counters.num_cut_pairs,
        counted.MESSAGES_DROPPED: counters.num_dropped,
        **({} if connector is None else _connector_gauges(connector, stats)),
    }


def _by_position(counts: Sequence[int]) -> dict[str, int]:
    return {str(position): count for position, count in enumerate(counts or (0,), start=1)}


def adapter_gauges(adapters: AdapterRegistry | None) -> Reading:
    """Return gauges that need no thread of their own; zeros without adapters."""
    counts = AdapterCounts() if adapters is None else adapters.counts()
    return {
        counted.ADAPTERS: {
            "named": counts.num_named,
            "in_memory": counts.num_in_memory,
            "in_use": counts.num_in_use,
            "reading": counts.num_reading,
        },
        counted.ADAPTER_BYTES: counts.num_bytes,
        counted.ADAPTER_WAITING: {
            "place": counts.num_waiting_for_place,
            "load": counts.num_waiting_for_load,
        },
        counted.ADAPTER_FAILURES: counts.total_failed,
        counted.ADAPTER_EVICTIONS: counts.total_evicted,
    }


def _adapters_in_use(adapters: AdapterRegistry | None) -> AdaptersInUse:
    return AdaptersInUse() if adapters is None else AdaptersInUse(*adapters.names_in_use())


def passes_by_launch(num_passes: Mapping[GraphSize | EagerCause, int]) -> dict[str, float]:
    """Return the passes that replayed a graph, whatever its size, and the others by reason."""
    by_launch: dict[str, float] = {"graph": 0}
    for choice, number in dict(num_passes).items():
        if isinstance(choice, EagerCause):
            launch = choice.name.lower()
        else:
            launch = "graph_with_adapters" if choice.has_adapters else "graph"
        by_launch[launch] = by_launch.get(launch, 0) + number
    return by_launch


def blocks_by_state(stats: SchedulerStats, num_fenced: int) -> dict[str, float]:
    """Return block counts by state, each block counted once.

    The scheduler counts fenced blocks as granted.
    """
    num_lent = max(stats.num_granted_blocks, num_fenced)
    return {
        "free": stats.num_free_blocks - stats.num_cached_free_blocks,
        "cached": stats.num_cached_free_blocks,
        "granted": num_lent - num_fenced,
        "fenced": num_fenced,
        "owned": stats.num_blocks - stats.num_free_blocks - num_lent,
    }


def _group_gauges(scheduler: Scheduler) -> Reading:
    groups = scheduler.stats_by_group()
    return {
        counted.GROUP_BLOCKS: {name: each.num_held for name, each in groups.items()},
        counted.GROUP_HITS: {name: each.total_hits for name, each in groups.items()},
        counted.GROUP_EVICTIONS: {name: each.total_evictions for name, each in groups.items()},
    }


def _connector_gauges(connector: GuardedConnector, stats: SchedulerStats) -> Reading:
    inner = connector.connector
    errors: Reading = {counted.CONNECTOR_ERRORS: connector.num_errors}
    return {**errors, **_tier_gauges(inner, stats)} if isinstance(inner, TieredKv) else errors


def _tier_gauges(tiers: TieredKv, stats: SchedulerStats) -> Reading:
    by_name = {tier.name: tier for tier in tiers.status()}
    num_tokens = stats.total_loaded_tokens
    return {
        counted.TIER_TOKENS: {name: num_tokens.get(name, 0) for name in by_name},
        counted.TIER_BLOCKS: {name: tier.num_blocks for name, tier in by_name.items()},
        counted.TIER_BYTES: {name: tier.num_bytes for name, tier in by_name.items()},
        counted.TIER_LIMIT: {name: tier.max_bytes for name, tier in by_name.items()},
        counted.TIER_LOADED: {name: tier.counters.num_loaded for name, tier in by_name.items()},
        counted.TIER_STORED: {name: tier.counters.num_stored for name, tier in by_name.items()},
        counted.TIER_EVICTED: {name: tier.order.num_evicted for name, tier in by_name.items()},
        counted.TIER_FAILED: {name: tier.counters.num_failed for name, tier in by_name.items()},
        counted.TIER_RETAINED: {name: tier.order.num_retained for name, tier in by_name.items()},
        counted.TIER_REFUSED: {name: tier.order.num_refused for name, tier in by_name.items()},
        counted.TIER_USABLE: {name: int(tier.is_usable) for name, tier in by_name.items()},
    }
