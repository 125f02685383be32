"""Inputs of a routing decision: a request, its prefix hits, and its cost on each node. Pure.

Costs are in tokens that a node computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from baton.core.ids import ANY_MODEL, ModelVariant, PrefixKeys
from baton.core.legs import LegKind
from baton.core.media import MediaSegment
from baton.core.request import GENERATE, Task
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node, Revision

# Cost of a request that a decode node already serves, in prompt tokens to move there.
DECODE_COST_TOKENS = 64
# Matches that cover a smaller share of the prompt are ignored: otherwise a common chat template
# would send all prompts to one node.
MIN_MATCH = 0.05
# Cost of an evicted token, in computed tokens: the probability of another hit.
EVICTION_WEIGHT = 0.25
# Costs of a pull and of each of its tokens, in computed tokens. Measured on CPUs, a token costs
# 0.006 to 0.02, and the latency 6 tokens; accelerators compute faster in relation.
PULL_LATENCY_COST = 8
PULL_COST = 0.05
# Costs of an adapter that the node must read from its folder, and of waiting until another one
# leaves a place in its batch. Both are estimates: their times depend on disk and load.
ADAPTER_LOAD_COST = 512
ADAPTER_WAIT_COST = 256


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """Inputs of a routing decision apart from the nodes."""

    prompt_token_ids: tuple[int, ...]
    number: int = 0  # counts the decisions: index for round robin and random draws
    prior_output_token_ids: tuple[int, ...] = ()
    model: ModelVariant = ANY_MODEL
    media: tuple[MediaSegment, ...] = ()  # in the prompt
    cache_salt: str = ""
    revision: Revision | None = None  # that started the answer and alone may continue it
    task: Task = GENERATE
    has_foreign_kv: bool = False  # of the prompt: no prefill node is needed
    foreign_kv_readers: frozenset[str] = frozenset()  # nodes that can use it; empty: all

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.prior_output_token_ids)


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """Node that has reported a prefix of a prompt, and can send its KV."""

    node: Node
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Node table with the prefix hits of one request."""

    table: NodeTable
    request: RoutingRequest
    names: tuple[BlockHash, ...] = ()
    # Cached tokens by address: reported ones, and those together with expected ones.
    reported: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)
    # Where the longest prefix can be pulled from, by the kind of KV.
    holders: Mapping[int | None, PrefixHolder] = field(default_factory=dict)

    def num_requests(self, node: Node) -> int:
        return self.table.node_load(node).num_requests

    def missing_from_reported(self, node: Node) -> int:
        return self.request.num_tokens - self.reported.get(node.address, 0)

    def holder_for(self, node: Node) -> PrefixHolder | None:
        """Return where this node should pull a prefix from, if another one has much more of it.

        The node decides whether a pull is faster than computing: it knows its speeds.
        """
        holder = self.holders.get(self.table.kind_number(node.address))
        if holder is None:
            return None
        num_cached = self.expected.get(node.address, 0)
        return holder if _is_pull_cheaper(num_cached, holder.num_tokens) else None

    def missing(self, node: Node) -> int:
        """Return the tokens that this node must compute if it computes the prompt."""
        holder, num_cached = self.holder_for(node), self.expected.get(node.address, 0)
        return self.request.num_tokens - (num_cached if holder is None else holder.num_tokens)

    def prompt_cost(self, node: Node) -> int:
        """Return the cost of the tokens that this node must compute or pull."""
        holder, num_cached = self.holder_for(node), self.expected.get(node.address, 0)
        num_held = num_cached if holder is None else holder.num_tokens
        return _prompt_cost(self.request.num_tokens, num_cached, num_held)

    def costs(self, kind: LegKind, nodes: Sequence[Node]) -> list[int]:
        """Estimate the cost of a leg on each node, with the requests that it already has.

        Evicted cache blocks count too, since later requests must compute them again.
        """
        cached, num_tokens = self.expected, self.request.num_tokens
        num_reported, kind_number = self.table.prefixes.num_reported, self.table.kind_number
        held = {kind: holder.num_tokens for kind, holder in self.holders.items()}
        costs = self._queued_costs(kind, nodes)
        if self.request.model.adapter.id:
            costs = [
                cost + self._adapter_cost(node) for cost, node in zip(costs, nodes, strict=True)
            ]
        for index, node in enumerate(nodes):
            card, num_cached = node.card, cached.get(node.address, 0)
            num_evicted = num_tokens - num_cached
            num_blank = card.num_distinct_blocks - num_reported(node.address)
            if num_blank > 0:
                num_evicted -= num_blank * card.fingerprint.layout.block_size
            if num_evicted > 0:
                costs[index] += int(EVICTION_WEIGHT * num_evicted)
            num_held = held.get(kind_number(node.address), 0) if held else 0
            costs[index] += _prompt_cost(num_tokens, num_cached, num_held)
        return costs

    def _adapter_cost(self, node: Node) -> int:
        """Estimate the cost of having the request's adapter in the node's batch."""
        adapter = self.request.model.adapter.id
        in_batch = self.table.node_load(node).sent_adapters
        if adapter in in_batch:
            return 0
        is_in_memory = adapter in self.table.adapters.at(node.address).in_memory
        cost = 0 if is_in_memory else ADAPTER_LOAD_COST
        return cost + ADAPTER_WAIT_COST * (len(in_batch) >= node.card.max_loras)

    def _queued_costs(self, kind: LegKind, nodes: Sequence[Node]) -> list[int]:
        """Estimate the cost of the requests that each node already has."""
        loads = [self.table.node_load(node) for node in nodes]
        if kind is LegKind.DECODE:
            return [load.num_sent_tokens + DECODE_COST_TOKENS * load.num_requests for load in loads]
        num_tokens = self.request.num_tokens  # assumed for each request of other routers
        return [
            load.num_sent_tokens + num_tokens * max(0, load.num_reported - load.num_sent)
            for load in loads
        ]


def build_view(table: NodeTable, request: RoutingRequest) -> RoutingView:
    """Match a request's prefix with the blocks of all nodes."""
    reported: dict[str, int] = {}
    expected: dict[str, int] = {}
    names: list[BlockHash] = []
    token_ids = request.prompt_token_ids + request.prior_output_token_ids
    keys = PrefixKeys(request.cache_salt, request.model.adapter.id, request.media)
    for naming in table.namings(request.model):
        block_size = naming.block_size
        # The last token is always computed: its logits give the next one.
        usable = naming.names(token_ids[:-1], len(request.prompt_token_ids), keys)
        match = table.prefixes.match(usable, needs_snapshot=naming.needs_snapshot)
        for hits, matched in zip((reported, expected), match, strict=True):
            hits.update({address: num * block_size for address, num in matched.items()})
        # Of a prompt's snapshots, the one at its last block is certain to be attempted.
        names += usable[-1:] if naming.needs_snapshot else usable
    return RoutingView(table, request, tuple(names), reported, expected)


def find_holders(view: RoutingView, unfit: frozenset[str]) -> dict[int | None, PrefixHolder]:
    """Return where the longest prefix can be pulled from, by the kind of KV.

    Only open nodes that are not in `unfit` qualify. What is merely expected does not count.
    """
    table, holders = view.table, dict[int | None, PrefixHolder]()
    for address in _by_length(view.reported, view.request.number):
        kind, node = table.kind_number(address), table.node_at(address)
        if kind in holders or node is None or address in unfit or not _can_send(table, node):
            continue
        holders[kind] = PrefixHolder(node, view.reported[address])
        if len(holders) == table.num_kinds:
            break
    return holders


def _can_send(table: NodeTable, node: Node) -> bool:
    return node.card.prefix_naming is not None and table.is_open(node)


def _by_length(reported: Mapping[str, int], number: int) -> Iterator[str]:
    """Yield the holders of a prefix, longest first. Equal ones take turns by request number."""
    if not reported:
        return
    longest = max(reported.values())
    equal = [address for address, num_tokens in reported.items() if num_tokens == longest]
    first = number % len(equal)
    yield from equal[first:]
    yield from equal[:first]
    shorter = [address for address, num_tokens in reported.items() if num_tokens < longest]
    yield from sorted(shorter, key=reported.__getitem__, reverse=True)


@lru_cache(maxsize=1024)  # many nodes have equally much
def _prompt_cost(num_tokens: int, num_cached: int, num_held: int) -> int:
    """Return the cost of a prompt of which another node holds `num_held` tokens."""
    min_match = MIN_MATCH * num_tokens
    if num_cached < min_match:
        num_cached = 0
    if num_held < min_match or not _is_pull_cheaper(num_cached, num_held):
        return num_tokens - num_cached
    return num_tokens - num_held + PULL_LATENCY_COST + ceil(PULL_COST * (num_held - num_cached))


def _is_pull_cheaper(num_cached: int, num_held: int) -> bool:
    num_gained = num_held - num_cached
    return num_gained > PULL_LATENCY_COST + PULL_COST * num_gained
