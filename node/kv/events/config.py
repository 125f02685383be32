"""Settings of a node's KV events. Names and meanings are those of vLLM's KVEventsConfig."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import KV_EVENTS, Option, check_options
from baton.node.kv.events.messages import HashFormat

TCP, IPC = "tcp://", "ipc://"
WILDCARD = "*"  # as a host: the addresses that the node listens on
LOOPBACK = "127.0.0.1"
BUFFER_STEPS = 10_000
MAX_QUEUED = 100_000
NODE_ID = "{node_id}"  # stands for the node's name in endpoints and topic


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """KV events of a node. Without an endpoint, there are none."""

    option = "--kv-events-endpoint"

    endpoint: Annotated[  # of the PUB socket
        str,
        Option(
            "ZeroMQ endpoint on which changes of the prefix cache are published in vLLM's format, "
            "for other routers: tcp://*:5557 (on --host) and ipc://PATH are bound, "
            "tcp://HOST:PORT is connected to. {node_id} stands for the node's name, here and in "
            "the topic. Default: none.",
            KV_EVENTS,
            name="kv_events_endpoint",
        ),
    ] = ""
    replay_endpoint: Annotated[  # of the ROUTER socket; empty: no replay
        str,
        Option(
            "ZeroMQ endpoint that answers requests for missed KV events, such as tcp://*:5558.",
            KV_EVENTS,
            name="kv_events_replay_endpoint",
            is_setting=True,
        ),
    ] = ""
    topic: Annotated[  # first frame of each message
        str,
        Option(
            "Topic of the KV events, such as kv@POD@MODEL for llm-d.",
            KV_EVENTS,
            name="kv_events_topic",
            is_setting=True,
        ),
    ] = ""
    buffer_steps: Annotated[
        int,
        Option(
            "Messages that are kept for replay.",
            KV_EVENTS,
            name="kv_events_buffer_steps",
            at_least=1,
            is_setting=True,
        ),
    ] = BUFFER_STEPS
    hwm: Annotated[
        int,
        Option(
            "Messages that wait for a slow subscriber; it misses the oldest ones.",
            KV_EVENTS,
            name="kv_events_hwm",
            at_least=1,
            is_setting=True,
        ),
    ] = MAX_QUEUED
    max_queue_size: Annotated[  # for the publishing thread
        int,
        Option(
            "Updates that wait to be published; later ones are lost.",
            KV_EVENTS,
            name="kv_events_max_queue_size",
            at_least=1,
            is_setting=True,
        ),
    ] = MAX_QUEUED
    hashes: Annotated[
        str,
        Option(
            "Form of block hashes in KV events: int (low 64 bits, as vLLM sends them) or bytes.",
            KV_EVENTS,
            name="kv_events_hashes",
            choices=tuple(each.value for each in HashFormat),
            is_setting=True,
        ),
    ] = HashFormat.INT.value
    host: str = LOOPBACK  # where an endpoint with `*` listens

    def __post_init__(self) -> None:
        check_options(self)
        if self.replay_endpoint and not self.endpoint:
            raise InvalidConfig("kv-events-replay-endpoint needs --kv-events-endpoint")
        if self.endpoint:
            self._check_endpoint("--kv-events-endpoint", self.endpoint)
        if self.replay_endpoint:
            self._check_endpoint("kv-events-replay-endpoint", self.replay_endpoint)

    @property
    def is_on(self) -> bool:
        return bool(self.endpoint)

    def check_shared(self) -> None:
        """Raise InvalidConfig for endpoints that several nodes cannot share."""
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            if NODE_ID not in endpoint:
                raise InvalidConfig(
                    f"{endpoint} cannot be shared by several nodes; write {NODE_ID} where their "
                    f"names go, such as ipc:///tmp/kv-events-{NODE_ID}"
                )

    def for_node(self, node_id: str, host: str) -> KvEventsConfig:
        return replace(
            self,
            host=host,
            endpoint=self.endpoint.replace(NODE_ID, node_id),
            replay_endpoint=self.replay_endpoint.replace(NODE_ID, node_id),
            topic=self.topic.replace(NODE_ID, node_id),
        )

    def _check_endpoint(self, option: str, endpoint: str) -> None:
        if not endpoint.startswith((TCP, IPC)):
            raise InvalidConfig(
                f"{option} {endpoint!r}: write it like tcp://*:5557 or ipc:///tmp/kv-events"
            )


def is_bound(endpoint: str) -> bool:
    """Return whether a node binds this endpoint. It connects to others, such as tcp://host:5557."""
    host = endpoint.removeprefix(TCP).rpartition(":")[0]
    return endpoint.startswith(IPC) or host in (WILDCARD, "0.0.0.0") or "::" in host
