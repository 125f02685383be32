"""Options of KV events for other routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from baton.node.kv.events.config import KvEventsConfig

KV_EVENTS_PANEL = "KV events"


def _option(help: str) -> Any:  # noqa: A002
    return typer.Option(help=help, rich_help_panel=KV_EVENTS_PANEL)


Endpoint = Annotated[
    str,
    _option(
        "ZeroMQ endpoint on which changes of the prefix cache are published in vLLM's format, for "
        "other routers: tcp://*:5557 (on --host) and ipc://PATH are bound, tcp://HOST:PORT is "
        "connected to. "
        "{node_id} stands for the node's name, here and in the topic. Default: none."
    ),
]
ReplayEndpoint = Annotated[
    str,
    _option("ZeroMQ endpoint that answers requests for missed KV events, such as tcp://*:5558."),
]
Topic = Annotated[str, _option("Topic of the KV events, such as kv@POD@MODEL for llm-d.")]
BufferSteps = Annotated[int, _option("Messages that are kept for replay.")]
Hwm = Annotated[
    int, _option("Messages that wait for a slow subscriber; it misses the oldest ones.")
]
MaxQueueSize = Annotated[int, _option("Updates that wait to be published; later ones are lost.")]


def check_kv_endpoint(endpoint: str, num_nodes: int) -> None:
    """Raise InvalidConfig for an endpoint that the nodes of a cluster cannot share."""
    from baton.core.errors import InvalidConfig
    from baton.node.kv.events.config import NODE_ID

    if endpoint and num_nodes > 1 and NODE_ID not in endpoint:
        raise InvalidConfig(
            f"{endpoint} cannot be shared by several nodes; write {NODE_ID} where their names "
            f"go, such as ipc:///tmp/kv-events-{NODE_ID}"
        )


def kv_events_config(
    kv_events_endpoint: Endpoint = "",
    kv_events_replay_endpoint: ReplayEndpoint = "",
    kv_events_topic: Topic = "",
    kv_events_buffer_steps: BufferSteps = 10_000,
    kv_events_hwm: Hwm = 100_000,
    kv_events_max_queue_size: MaxQueueSize = 100_000,
) -> KvEventsConfig | None:
    """KV events of a node; None without an endpoint. Raises InvalidConfig."""
    from baton.core.errors import InvalidConfig
    from baton.node.kv.events.config import KvEventsConfig

    if not kv_events_endpoint:
        if kv_events_replay_endpoint:
            raise InvalidConfig("--kv-events-replay-endpoint needs --kv-events-endpoint")
        return None
    return KvEventsConfig(
        kv_events_endpoint,
        kv_events_replay_endpoint,
        kv_events_topic,
        kv_events_buffer_steps,
        kv_events_hwm,
        kv_events_max_queue_size,
    )
