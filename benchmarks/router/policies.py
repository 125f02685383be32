"""Routing policies on a simulated cluster: the router's own code with simulated nodes and time.

Prefill nodes are queues that compute one prompt at a time; decode nodes generate all their
answers concurrently. Both cache prefixes with LRU eviction and report changes to the router with
a delay, like real nodes. Not simulated: transfer time of KV (only its size is counted), and
interference between requests in a step.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from engine.kv_cache.block_hashes import BlockHash, PrefixNaming
from kv_transfer.protocol.messages import Fingerprint
from kv_transfer.types import Incarnation, NodeId
from router.routing.assignment import Assignment
from router.routing.node_table import Node, NodeTable
from router.routing.policy import Routing, RoutingPolicy, RoutingRequest, choose
from rpc.cached_prefixes import PrefixChanges, pack_names
from rpc.node_info import NodeCard, NodeLoad, NodeRole


@dataclass(frozen=True, slots=True)
class PolicyBench:
    """Simulated cluster and load."""

    num_nodes: int = 1000  # half of them prefill nodes
    num_requests: int = 6_000
    num_system_prompts: int = 50  # prefixes of sessions
    skew: float = 1.1  # Zipf exponent of their popularity
    load: float = 0.7  # relative to the prefill capacity without prefix hits
    seed: int = 0
    block_size: int = 64
    num_blocks: int = 256  # KV blocks of a node
    system_tokens: int = 512
    turn_tokens: int = 256  # added to a session by each turn
    max_turns: int = 12  # of a session, uniform from 1
    least_pause_s: float = 2.0  # between turns
    mean_pause_s: float = 4.0
    answer_tokens: int = 32
    prefill_tokens_per_s: float = 2_000.0
    decode_s_per_token: float = 0.02
    news_delay_s: float = 0.02  # until the router receives a change


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of the requests after the first third, which warms the caches."""

    policy: str
    prefill_hit_rate: float  # share of prompt tokens cached on the prefill node
    decode_hit_rate: float  # share of prompt tokens cached on the decode node, hence not moved
    p50_wait_s: float  # from the request to its first token
    p99_wait_s: float
    busiest_decode: int  # maximum of concurrent answers on one node
    busiest_prefill: float  # largest share of prompt tokens on one node


@dataclass(frozen=True, slots=True)
class SimRequest:
    at_s: float
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class SimNode:
    """Simulated node: cache and queue."""

    node: Node
    num_blocks: int
    cached: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    waiting: deque[SimVisit] = field(default_factory=deque)  # the first is being computed
    num_requests: int = 0
    most_requests: int = 0
    num_tokens: int = 0  # of prompts sent to it
    sequence: int = 1

    def hit(self, names: Sequence[BlockHash]) -> int:
        return next((n for n, name in enumerate(names) if name not in self.cached), len(names))

    def store(self, names: Sequence[BlockHash]) -> PrefixChanges:
        """Cache the blocks and return the changes to report to the router."""
        stored = {name for name in names if name not in self.cached}
        for name in reversed(names):  # the end of a sequence is evicted first
            self.cached[name] = None
            self.cached.move_to_end(name)
        removed = set()
        while len(self.cached) > self.num_blocks:
            removed.add(self.cached.popitem(last=False)[0])
        self.sequence += 1
        return PrefixChanges(
            self.sequence, False, pack_names(stored - removed), pack_names(removed - stored)
        )

    def begin(self, num_tokens: int) -> None:
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.most_requests = max(self.most_requests, self.num_requests)


@dataclass(frozen=True, slots=True)
class SimVisit:
    """One request on its two nodes."""

    request: SimRequest
    names: Sequence[BlockHash]
    assignment: Assignment
    prefill: SimNode
    decode: SimNode
    is_counted: bool


def run(what: PolicyBench, on_done: Callable[[PolicyFigures], None]) -> list[PolicyFigures]:
    requests = make_requests(what)
    figures = []
    for policy in RoutingPolicy:
        figures.append(Simulation(what, policy).run(requests))
        on_done(figures[-1])
    return figures


def make_requests(what: PolicyBench) -> list[SimRequest]:
    """Return requests of sessions whose prompts grow by turns and share system prompts."""
    draw = random.Random(what.seed)
    systems = [_tokens(draw, what.system_tokens) for _ in range(what.num_system_prompts)]
    weights = [1 / place**what.skew for place in range(1, len(systems) + 1)]
    mean_turns = (1 + what.max_turns) / 2
    # Late turns are rarer than early ones: sessions have 1 to max_turns turns.
    mean_tokens = what.system_tokens + what.turn_tokens * (what.max_turns + 2) / 3
    per_s = what.load * (what.num_nodes // 2) * what.prefill_tokens_per_s / mean_tokens
    # Start before time 0, so that sessions of every age exist at the start.
    now, end_s = -what.max_turns * what.mean_pause_s, what.num_requests / per_s
    requests: list[SimRequest] = []
    while now < end_s:
        now += draw.expovariate(per_s / mean_turns)
        [system] = draw.choices(systems, weights)
        requests += _session(what, draw, now, system)
    timely = (request for request in requests if 0 <= request.at_s < end_s)
    return sorted(timely, key=lambda request: request.at_s)


def _session(
    what: PolicyBench, draw: random.Random, at_s: float, history: tuple[int, ...]
) -> list[SimRequest]:
    turns = []
    for _ in range(draw.randint(1, what.max_turns)):
        history += _tokens(draw, what.turn_tokens)
        turns.append(SimRequest(at_s, history))
        at_s += what.least_pause_s
        at_s += draw.expovariate(1 / (what.mean_pause_s - what.least_pause_s))
    return turns


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(50_000), k=count))


class Simulation:
    def __init__(self, what: PolicyBench, policy: RoutingPolicy) -> None:
        self._what = what
        self._routing = Routing(policy, seed=what.seed)
        self._table = NodeTable()
        self._nodes: dict[str, SimNode] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._waits: list[float] = []
        self._num_tokens = 0
        self._num_hit = {NodeRole.PREFILL: 0, NodeRole.DECODE: 0}
        self._naming = PrefixNaming(what.block_size)
        half = what.num_nodes // 2
        for role, count in ((NodeRole.PREFILL, half), (NodeRole.DECODE, what.num_nodes - half)):
            for number in range(count):
                self._join(role, f"{role.value}-{number:04}")

    def run(self, requests: Sequence[SimRequest]) -> PolicyFigures:
        first_counted = len(requests) // 3
        for number, request in enumerate(requests):
            self._run_events(request.at_s)
            self._serve(number, request, is_counted=number >= first_counted)
        self._run_events(math.inf)
        waits = sorted(self._waits)
        decodes = [n for n in self._nodes.values() if n.node.card.role is NodeRole.DECODE]
        prefills = [n for n in self._nodes.values() if n.node.card.role is NodeRole.PREFILL]
        all_tokens = sum(node.num_tokens for node in prefills)
        return PolicyFigures(
            policy=self._routing.policy.value,
            prefill_hit_rate=self._num_hit[NodeRole.PREFILL] / self._num_tokens,
            decode_hit_rate=self._num_hit[NodeRole.DECODE] / self._num_tokens,
            p50_wait_s=waits[len(waits) // 2],
            p99_wait_s=waits[len(waits) * 99 // 100],
            busiest_decode=max(node.most_requests for node in decodes),
            busiest_prefill=max(node.num_tokens for node in prefills) / all_tokens,
        )

    def _serve(self, number: int, request: SimRequest, *, is_counted: bool) -> None:
        route = choose(self._table, self._routing, RoutingRequest(request.token_ids, number))
        if route.prefill is None:
            raise RuntimeError("every simulated pair fits")
        names = _names(self._naming, request.token_ids[:-1])
        visit = SimVisit(
            request,
            names,
            Assignment(self._table, route),
            self._nodes[route.prefill.address],
            self._nodes[route.decode.address],
            is_counted,
        )
        visit.decode.begin(len(request.token_ids))
        visit.prefill.begin(len(request.token_ids))
        if is_counted:
            self._num_tokens += len(request.token_ids)
            self._count_hit(visit.decode, visit.decode.hit(names))
        visit.prefill.waiting.append(visit)
        if len(visit.prefill.waiting) == 1:
            self._compute(visit)

    def _compute(self, visit: SimVisit) -> None:
        """Compute the first prompt of a prefill node's queue, except for its cached prefix."""
        num_hit = visit.prefill.hit(visit.names)
        num_missing = len(visit.request.token_ids) - num_hit * self._what.block_size
        computed_s = self._now + num_missing / self._what.prefill_tokens_per_s
        if visit.is_counted:
            self._count_hit(visit.prefill, num_hit)
            self._waits.append(computed_s - visit.request.at_s)
        self._at(computed_s, lambda: self._computed(visit))

    def _computed(self, visit: SimVisit) -> None:
        visit.prefill.num_requests -= 1
        visit.assignment.note_prompt_done()
        for node in (visit.prefill, visit.decode):
            self._report(node, node.store(visit.names))
        visit.prefill.waiting.popleft()
        if visit.prefill.waiting:
            self._compute(visit.prefill.waiting[0])
        answer_s = self._what.answer_tokens * self._what.decode_s_per_token
        self._at(self._now + answer_s, lambda: self._ended(visit))

    def _ended(self, visit: SimVisit) -> None:
        visit.decode.num_requests -= 1
        visit.assignment.close()
        self._report(visit.decode, None)

    def _count_hit(self, node: SimNode, num_blocks: int) -> None:
        self._num_hit[node.node.card.role] += num_blocks * self._what.block_size

    def _report(self, node: SimNode, changes: PrefixChanges | None) -> None:
        load, address = NodeLoad(node.num_requests), node.node.address

        def receive() -> None:
            self._table.note_load(address, load)
            if changes is not None:
                self._table.note_prefixes(address, changes)

        self._at(self._now + self._what.news_delay_s, receive)

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _run_events(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now = now

    def _join(self, role: NodeRole, name: str) -> None:
        card = NodeCard(
            node_id=NodeId(name),
            incarnation=Incarnation(""),
            role=role,
            fingerprint=Fingerprint("sim", "", "", self._what.block_size, 1, 1, 1),
            model="sim",
            max_model_len=2**20,
            vocab_size=2**16,
            num_blocks=self._what.num_blocks,
            block_bytes=1,
            kv_transport="sim",
            prefix_naming=self._naming,
        )
        self._table.join(name, card)
        self._table.note_prefixes(name, PrefixChanges(1, True, b""))
        self._nodes[name] = SimNode(Node(name, card), self._what.num_blocks)


@lru_cache(maxsize=2**15)
def _names(naming: PrefixNaming, token_ids: tuple[int, ...]) -> tuple[BlockHash, ...]:
    """Return the block names of a prompt, cached since every policy uses the same prompts."""
    return tuple(naming.names(token_ids, len(token_ids) + 1))
