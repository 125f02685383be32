"""What a node tells at each scrape, beside what it counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from kv_transfer.worker import KvTransferWorker
from serving.node_options import NodeOptions
from serving.node_tracing import NodeTracing
from serving.scrapes import asked_on
from telemetry import metric_names as names
from telemetry.metrics import Reading, metrics_served


@contextmanager
def node_metrics(
    options: NodeOptions,
    traced: NodeTracing,
    engine: EngineLoop,
    scheduler: Scheduler,
    worker: KvTransferWorker,
) -> Iterator[None]:
    """Served from here to the end of the block, if they are wanted."""
    port = options.telemetry.metrics_port
    if port is None or traced.metrics is None:
        yield
        return
    read = asked_on(engine.post, lambda: read_node(scheduler, worker, traced))
    with metrics_served(traced.metrics.registry, options.host, port, read):
        yield


def read_node(scheduler: Scheduler, worker: KvTransferWorker, traced: NodeTracing) -> Reading:
    stats, counters = scheduler.stats(), worker.counters()
    return {
        names.RUNNING: stats.num_running,
        names.WAITING: {
            "in line": stats.num_waiting,
            "for remote kv": stats.num_waiting_for_remote_kvs,
            "ready": stats.num_ready,
        },
        names.BLOCKS: {
            "all": stats.num_blocks,
            "free": stats.num_free_blocks,
            "fenced": counters.num_fenced_blocks,
        },
        names.OPEN_HANDOFFS: {
            "received": stats.num_pending_receives,
            "sent": stats.num_pending_sends,
        },
        names.PREEMPTIONS: stats.total_preemptions,
        names.PREFIX_TOKENS: {
            "asked": stats.total_prefix_query_tokens,
            "found": stats.total_prefix_hit_tokens,
        },
        names.DIGEST_MISMATCHES: counters.num_digest_mismatches,
        names.CUT_PAIRS: counters.num_cut_pairs,
        names.LINKS: len(worker.connected_peers()),
        names.TRACES_LOST: traced.num_lost,
    }
