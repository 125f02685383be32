"""SMG's service of a node, if the options want it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from baton.engine.errors import EngineStopped
from baton.engine.events import SchedulerStats
from baton.node.cache_resets import CacheResets, reset_prefix_cache
from baton.node.call_server import CallServer
from baton.node.engine_calls import run_on_engine
from baton.node.kv.connectors import shared_tiers_of
from baton.node.wiring import NodeComponents
from baton.rpc.security.operators import Operators
from baton.rpc.server import Service
from baton.rpc.smg.model_facts import read_model_facts


def smg_services(node: NodeComponents, calls: CallServer) -> Sequence[Service]:
    if not node.options.smg:
        return ()
    # Imported late: their messages are in a package of an extra.
    from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

    from baton.node.smg.servicer import SERVICE, SmgNodeServicer

    resets = CacheResets(
        node.state,
        partial(reset_prefix_cache, node.engine, node.scheduler),
        Operators(node.options.operator_tokens),
        shared_tiers_of(node.connector),
    )
    facts = read_model_facts(node.options.runner.model)
    servicer = SmgNodeServicer(
        calls, node.state, partial(_find_trouble, node), partial(_read_stats, node), resets, facts
    )
    add = partial(sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server, servicer)
    return (Service(SERVICE, add),)


def _find_trouble(node: NodeComponents) -> str:
    """Return why the node does not serve now; empty: it does."""
    if node.engine.failure is not None:
        return f"the engine failed: {node.engine.failure!r}"
    if node.state.is_draining:
        return "the node is draining"
    silence_s = node.engine.seconds_since_heartbeat()
    if silence_s >= node.options.stuck_after_s:
        return f"no heartbeat of the engine for {silence_s:.1f} s"
    return ""


async def _read_stats(node: NodeComponents) -> SchedulerStats:
    """Read the load between two steps. Raises EngineStopped."""
    if node.engine.failure is not None:
        raise EngineStopped("the engine of this node has stopped")
    return await run_on_engine(node.engine, node.scheduler.stats)
