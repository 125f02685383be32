"""KV events as a part of a node: checks of their endpoints, and the publisher."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from baton.core.ids import PrefixKeys
from baton.engine.config import EngineOptions
from baton.engine.factory import cache_config_for
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.kv_transfer.pairs import Identity
from baton.node.kv.events.config import TCP, is_bound
from baton.node.kv.events.messages import CacheFacts, HashFormat, spec_kind_of
from baton.node.kv.events.peers import check_target, listen
from baton.node.kv.events.publisher import KvEventPublisher
from baton.node.options import NodeOptions
from baton.node.part import NodePart

MAX_ROOTS = 1024  # of adapters, that are remembered


def check_endpoints(options: NodeOptions) -> None:
    """Listen for a moment. A path would be taken from a node that listens on it."""
    if not options.kv_events.is_on:
        return
    config = options.kv_events.for_node(options.node_id, options.host)
    bound = {"kv-events-replay-endpoint": config.replay_endpoint}
    if is_bound(config.endpoint):
        bound["--kv-events-endpoint"] = config.endpoint
    else:
        check_target("--kv-events-endpoint", config.endpoint)
    for option, endpoint in bound.items():
        if endpoint.startswith(TCP):
            with listen(option, endpoint, config.host):
                pass


def make_publisher(
    options: NodeOptions, identity: Identity, runner: LoadedRunner, _wake: Callable[[], None]
) -> NodePart | None:
    """Return the publisher; None without an endpoint, or without a KV cache."""
    memory = runner.kv_memory
    if memory is None or not options.kv_events.is_on:
        return None
    naming = cache_config_for(runner, EngineOptions()).naming
    facts = CacheFacts(
        memory.blocks.block_size,
        lru_cache(MAX_ROOTS)(lambda adapter_id: naming.root(PrefixKeys(adapter=adapter_id))),
        spec_kind_of(memory.layout, is_latent=memory.blocks.num_tensors == 1),
        memory.layout.groups[0].spec.window,
        HashFormat(options.kv_events.hashes),
    )
    config = options.kv_events.for_node(identity.node_id, options.host)
    publisher = KvEventPublisher(config, facts)
    return NodePart(publisher, take_kv_events=publisher.publish)
