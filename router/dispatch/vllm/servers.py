"""vLLM prefill servers as the router knows them: health, load, and the nodes that fit them.

A server is used while it is healthy, has not just failed, and its check together with an open
decode node has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from baton.core.ids import Incarnation
from baton.core.legs import LegKind
from baton.router.discovery.sources import VllmServer
from baton.router.dispatch.retries import BreakerConfig, CircuitBreakers
from baton.router.dispatch.vllm.http_api import VllmApi
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.rpc.node_info import NodeAvailability, NodeStatus

BREAKERS = BreakerConfig(num_failures=1, first_pause_s=1.0, max_pause_s=30.0)
RUNNING_COST_TOKENS = 64  # of a request in the server's batch, in prompt tokens to compute
FULL = 0.95  # use of a KV cache from which prompts would probably wait
ENGINE_CHARACTERS = 8
NOT_REACHED = "it has not been reached yet"

# Process of a decode node.
NodeKey = tuple[str, Incarnation]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0 to 1


GAUGES = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}


def read_load(page: str) -> ServerLoad:
    """Return the load on a page of metrics: sums over a server's engines, but the fullest cache."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name = GAUGES.get(line.partition("{")[0].partition(" ")[0])
        if name is None:
            continue
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if not isfinite(value):
            continue
        both = found.get(name, 0.0), value
        found[name] = max(both) if name == "kv_usage" else sum(both)
    running, waiting = (int(found.get(name, 0)) for name in ("num_running", "num_waiting"))
    return ServerLoad(running, waiting, found.get("kv_usage", 0.0))


@dataclass(slots=True, eq=False)
class PrefillServer:
    api: VllmApi
    model: str = ""  # name in requests to it
    root: str = ""  # folder or hub name of the model
    version: str = ""
    engine_id: str = ""  # at the last check; it changes when the server restarts
    load: ServerLoad = ServerLoad()
    trouble: str = NOT_REACHED  # empty while it is healthy
    num_tokens: int = 0  # of the prompts that it computes for this router
    num_sent: int = 0
    timers: set[asyncio.Timeout] = field(default_factory=set)  # of those prompts
    # Why its KV is of no use on a node; empty: it is. Nodes that are missing were not checked.
    mismatches: dict[NodeKey, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return str(self.api)

    def cost(self, num_tokens: int) -> tuple[bool, int]:
        """Return the prompt tokens ahead of a prompt, after whether the KV cache is full.

        Requests that others have sent are known by their number alone; those that wait count as
        prompts of the same length.
        """
        others = max(0, self.load.num_running + self.load.num_waiting - self.num_sent)
        waiting = min(others, self.load.num_waiting)
        ahead = waiting * num_tokens + (others - waiting) * RUNNING_COST_TOKENS
        return self.load.kv_usage >= FULL, self.num_tokens + ahead

    def note_gone(self, trouble: str) -> None:
        """Forget what may be different when the server is back, and give up its prompts."""
        self.trouble, self.model, self.engine_id = trouble, "", ""
        self.load = ServerLoad()
        self.mismatches.clear()
        for timer in self.timers:
            if not timer.expired():
                timer.reschedule(0.0)


class PrefillServers:
    def __init__(
        self, addresses: Sequence[VllmServer], table: NodeTable, clock: Callable[[], float]
    ) -> None:
        self.all = [PrefillServer(VllmApi(each.host, each.port)) for each in addresses]
        self.table = table
        self._clock = clock
        self._breakers = CircuitBreakers(BREAKERS)
        self._last_failures: dict[str, str] = {}

    def choose(self, model: str, num_tokens: int) -> list[PrefillServer]:
        """Return the servers that can compute a prompt of a model, the best one first."""
        avoided = self._breakers.avoided_addresses(self._clock())
        usable = [
            server
            for server in self.all
            if not server.trouble and server.address not in avoided and self.readers(server, model)
        ]
        return sorted(usable, key=lambda server: server.cost(num_tokens))

    def readers(self, server: PrefillServer, model: str) -> frozenset[str]:
        """Return the addresses of the decode nodes that can use the server's KV."""
        nodes = self.decode_nodes(model)
        fit = (node for node in nodes if server.mismatches.get(key_of(node)) == "")
        return frozenset(node.address for node in fit)

    def decode_nodes(self, model: str = "") -> list[Node]:
        """Return the open decode nodes of a model, or of all."""
        nodes = self.table.open_nodes(LegKind.DECODE)
        return [node for node in nodes if node.card.generates and model in ("", node.card.model)]

    def note_sent(self, server: PrefillServer) -> None:
        self._breakers.note_sent((server.address,), self._clock())

    def note_failure(self, server: PrefillServer, reason: str) -> None:
        self._last_failures[server.address] = reason
        self._breakers.note_failure((server.address,), self._clock())

    def note_success(self, server: PrefillServer) -> None:
        self._last_failures.pop(server.address, None)
        self._breakers.note_success((server.address,))

    def report(self) -> tuple[NodeStatus, ...]:
        return tuple(sorted(self._report(), key=lambda status: status.address))

    def _report(self) -> Iterator[NodeStatus]:
        for server in self.all:
            state, reason = self._state(server)
            yield NodeStatus(
                (LegKind.PREFILL,),
                server.address,
                state,
                node_id=server.model and "vllm",
                incarnation=server.engine_id[:ENGINE_CHARACTERS],
                model=server.model,
                version=server.version,
                kv_transport="nixl",
                num_running=server.load.num_running,
                num_waiting=server.load.num_waiting,
                num_sent=server.num_sent,
                reason=reason,
            )

    def _state(self, server: PrefillServer) -> tuple[NodeAvailability, str]:
        if server.trouble:
            return NodeAvailability.UNREACHABLE, server.trouble
        if server.address in self._breakers.avoided_addresses(self._clock()):
            return NodeAvailability.NOT_READY, self._last_failures.get(server.address, "")
        found = self._found_by_node(server)
        mismatched = [f"{address}: {reason}" for address, reason in found.items() if reason]
        if mismatched:
            is_usable = "" in found.values()
            state = NodeAvailability.READY if is_usable else NodeAvailability.MISMATCHED
            return state, "; ".join(mismatched)
        if found:
            return NodeAvailability.READY, ""
        return NodeAvailability.NOT_READY, "its check with a decode node is not over"

    def _found_by_node(self, server: PrefillServer) -> Mapping[str, str]:
        checked = {key_of(node): node.address for node in self.decode_nodes()}
        return {checked[key]: reason for key, reason in server.mismatches.items() if key in checked}


def key_of(node: Node) -> NodeKey:
    return node.address, node.card.incarnation
