"""Checks at the start of a node, before it loads the weights, which can take minutes."""

from __future__ import annotations

from baton.kv_transfer.transports.nixl import import_nixl
from baton.node.kv.connectors import find_connector
from baton.node.kv.events.config import TCP, KvEventsConfig, is_bound
from baton.node.kv.events.endpoints import check_target, listen
from baton.node.kv.tiers import check_tiers
from baton.node.options import NodeOptions
from baton.rpc.listening import check_port


def check_start(options: NodeOptions) -> None:
    """Raise a named error for what cannot work on this machine, whatever the weights are."""
    connector = options.chosen_connector
    if connector is not None:
        find_connector(connector.name)
        if connector.name == "tiers":
            check_tiers(connector.config)
    if options.kv_transport == "nixl":
        import_nixl()
    if options.telemetry.metrics_port is not None:
        check_port(options.telemetry.metrics_host, options.telemetry.metrics_port, "--metrics-port")
    if options.kv_events.is_on:
        _check_endpoints(options.kv_events.for_node(options.node_id, options.host))


def _check_endpoints(config: KvEventsConfig) -> None:
    """Listen for a moment. A path would be taken from a node that listens on it."""
    bound = {"--kv-events-replay-endpoint": config.replay_endpoint}
    if is_bound(config.endpoint):
        bound["--kv-events-endpoint"] = config.endpoint
    else:
        check_target("--kv-events-endpoint", config.endpoint)
    for option, endpoint in bound.items():
        if endpoint.startswith(TCP):
            with listen(option, endpoint, config.host):
                pass
