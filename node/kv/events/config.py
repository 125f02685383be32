"""Settings of a node's KV events. Names and meanings are those of vLLM's KVEventsConfig."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.core.errors import InvalidConfig

TCP, IPC = "tcp://", "ipc://"
WILDCARD = "*"  # as a host: the addresses that the node listens on
LOOPBACK = "127.0.0.1"
BUFFER_STEPS = 10_000
MAX_QUEUED = 100_000
NODE_ID = "{node_id}"  # stands for the node's name in endpoints and topic


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    endpoint: str  # of the PUB socket
    replay_endpoint: str = ""  # of the ROUTER socket; empty: no replay
    topic: str = ""  # first frame of each message
    buffer_steps: int = BUFFER_STEPS  # messages kept for replay
    hwm: int = MAX_QUEUED  # messages that wait for a slow subscriber; the oldest ones are skipped
    max_queue_size: int = MAX_QUEUED  # updates queued for the publishing thread
    host: str = LOOPBACK  # where an endpoint with `*` listens

    def __post_init__(self) -> None:
        self._check_endpoint("--kv-events-endpoint", self.endpoint)
        if self.replay_endpoint:
            self._check_endpoint("--kv-events-replay-endpoint", self.replay_endpoint)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                option = f"--kv-events-{name.replace('_', '-')}"
                raise InvalidConfig(f"{option} is {getattr(self, name)}; it must be at least 1")

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
