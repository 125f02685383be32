"""Simulated cluster: the router's own code with simulated nodes and time.

Prefill nodes are queues that compute one prompt at a time; decode nodes generate all their answers
concurrently. Both keep prefixes like real nodes, and report changes to every router with a delay.
A router knows of the requests of others only what nodes report. Not simulated: the time of pushes
from prefill to decode nodes (only the tokens are counted), interference between requests in a step,
and loads during the computing of other prompts: they delay the queue.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.core.ids import Incarnation, NodeId
from baton.core.legs import LegKind
from baton.engine.kv_cache.block_hashes import BlockHash, PrefixNaming
from baton.kv_transfer.layout import KvLayout
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.router.dispatch.dispatcher import Assignment
from baton.router.routing.config import Routing
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, choose
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc.node_info import NodeCard, NodeLoad
from benchmarks.router.sim_node import Names, SimNode, Sources
from benchmarks.router.workloads import SimRequest


@dataclass(frozen=True, slots=True)
class SimCluster:
    num_prefill: int = 2
    num_decode: int = 2
    num_routers: int = 1  # they take turns
    block_size: int = 16
    num_blocks: int = 256
    num_host_blocks: int = 0  # of its host memory tier
    has_files: bool = False  # that all nodes share, without a limit
    prefill_tokens_per_s: float = 2_000.0
    host_tokens_per_s: float = 100_000.0
    file_tokens_per_s: float = 40_000.0
    pull_tokens_per_s: float = 40_000.0
    decode_s_per_token: float = 0.02
    report_delay_s: float = 0.02  # until a router receives a change
    file_delay_s: float = 0.2  # until other nodes find a file


@dataclass(frozen=True, slots=True)
class Served:
    """One request: tokens of its prompt, and blocks by source on the node that computed it."""

    num_tokens: int
    sources: Sources
    num_on_decode: int  # tokens that were not moved to the decode node
    wait_s: float
    is_local: bool


@dataclass(frozen=True, slots=True)
class SimVisit:
    """One request on its nodes."""

    number: int
    request: SimRequest
    names: Names
    route: Route
    assignment: Assignment
    computing: SimNode[SimVisit]
    decode: SimNode[SimVisit]
    num_on_decode: int  # blocks


class Simulation:
    def __init__(self, cluster: SimCluster, routing: Routing) -> None:
        self._cluster = cluster
        self._routing = routing
        self._tables = [NodeTable() for _ in range(cluster.num_routers)]
        self.nodes: dict[str, SimNode[SimVisit]] = {}
        self._files: set[BlockHash] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._naming = PrefixNaming(cluster.block_size)
        self._served: dict[int, Served] = {}
        roles = {LegKind.PREFILL: cluster.num_prefill, LegKind.DECODE: cluster.num_decode}
        for role, count in roles.items():
            for number in range(count):
                self._join(role, f"{role.value}-{number:04}")

    def run(self, requests: Sequence[SimRequest]) -> list[Served]:
        """Serve requests, which are in order of time, and return how."""
        for number, request in enumerate(requests):
            self._run_events(request.at_s)
            self._arrive(number, request)
        self._run_events(math.inf)
        return [self._served[number] for number in range(len(requests))]

    def _arrive(self, number: int, request: SimRequest) -> None:
        table = self._tables[number % len(self._tables)]
        route = choose(table, self._routing, RoutingRequest(request.token_ids, number))
        names = block_names(self._naming, request.token_ids[:-1])
        decode = self.nodes[route.last.node.address]
        computing = self.nodes[route.first.node.address]
        visit = SimVisit(
            number,
            request,
            names,
            route,
            Assignment(table, route),
            computing,
            decode,
            decode.num_cached(names),
        )
        for address in route.addresses:
            self.nodes[address].begin(len(request.token_ids))
        computing.waiting.append(visit)
        if len(computing.waiting) == 1:
            self._compute(visit)

    def _compute(self, visit: SimVisit) -> None:
        """Compute the first prompt of a node's queue, without tokens that are loaded or pulled."""
        num_on_peer = self._num_on_peer(visit)
        sources = visit.computing.find(visit.names, self._files, num_on_peer)
        wait_s = self._now + self._prompt_s(visit, sources) - visit.request.at_s
        block_size = self._cluster.block_size
        self._served[visit.number] = Served(
            num_tokens=len(visit.request.token_ids),
            sources=sources,
            num_on_decode=visit.num_on_decode * block_size,
            wait_s=wait_s,
            is_local=not visit.route.is_split,
        )
        self._at(visit.request.at_s + wait_s, lambda: self._computed(visit))

    def _num_on_peer(self, visit: SimVisit) -> int:
        """Return the number of leading blocks that the node named by the route can send."""
        holder = visit.route.holder
        if holder is None:
            return 0
        num_held = self.nodes[holder.node.address].num_held(visit.names)
        return min(holder.num_tokens // self._cluster.block_size, num_held)

    def _prompt_s(self, visit: SimVisit, sources: Sources) -> float:
        cluster, block_size = self._cluster, self._cluster.block_size
        num_missing = len(visit.request.token_ids) - sources.num_blocks * block_size
        return (
            num_missing / cluster.prefill_tokens_per_s
            + sources.host * block_size / cluster.host_tokens_per_s
            + sources.file * block_size / cluster.file_tokens_per_s
            + sources.peer * block_size / cluster.pull_tokens_per_s
        )

    def _computed(self, visit: SimVisit) -> None:
        visit.assignment.note_prompt_done()
        if visit.computing is not visit.decode:
            visit.computing.num_requests -= 1
            self._store(visit.computing, visit.names)
        self._store(visit.decode, visit.names)
        waiting = visit.computing.waiting
        waiting.popleft()
        if waiting:
            self._compute(waiting[0])
        answer_s = visit.request.num_answer_tokens * self._cluster.decode_s_per_token
        self._at(self._now + answer_s, lambda: self._ended(visit))

    def _ended(self, visit: SimVisit) -> None:
        visit.decode.num_requests -= 1
        visit.assignment.close()
        self._store(visit.decode, block_names(self._naming, visit.request.sequence))

    def _store(self, node: SimNode[SimVisit], names: Names) -> None:
        node.store(names)
        if self._cluster.has_files:
            self._at(self._now + self._cluster.file_delay_s, lambda: self._files.update(names))
        for number, table in enumerate(self._tables):
            self._report(node, number, table)

    def _report(self, node: SimNode[SimVisit], number: int, table: NodeTable) -> None:
        load, address = NodeLoad(node.num_requests), node.node.address
        changes = node.take_changes(number)

        def receive() -> None:
            table.note_load(address, load)
            for each in changes:
                table.note_prefixes(address, each)

        self._at(self._now + self._cluster.report_delay_s, receive)

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _run_events(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now = now

    def _join(self, role: LegKind, name: str) -> None:
        cluster = self._cluster
        card = NodeCard(
            node_id=NodeId(name),
            incarnation=Incarnation(""),
            legs=(role,),
            fingerprint=Fingerprint("sim", KvLayout("", cluster.block_size, 1, 1, 1)),
            model="sim",
            max_model_len=2**20,
            vocab_size=2**16,
            num_blocks=cluster.num_blocks,
            block_bytes=1,
            kv_transport="sim",
            prefix_naming=self._naming,
            num_host_blocks=cluster.num_host_blocks,
        )
        node = self.nodes[name] = SimNode[SimVisit](Node(name, card), cluster.num_routers)
        for number, table in enumerate(self._tables):
            table.join(name, card)
            for changes in node.take_changes(number):
                table.note_prefixes(name, changes)


@lru_cache(maxsize=2**15)
def block_names(naming: PrefixNaming, token_ids: tuple[int, ...]) -> tuple[BlockHash, ...]:
    """Return block names, cached since every variant serves the same requests."""
    return tuple(naming.names(token_ids, len(token_ids) + 1))
