"""Policies that choose the nodes of a request from the node table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from engine.kv_cache.block_hashes import BlockHash
from errors import InvalidConfig
from router.routing.node_table import Node, NodeGroup, NodeTable, Revision
from rpc.errors import IncompatibleNodes, NoNodes
from rpc.node_info import NodeRole

# Cost of a request that a decode node already serves, in prompt tokens to move there.
DECODE_COST_TOKENS = 64
# Matches that cover a smaller share of the prompt are ignored: otherwise a common chat template
# would send all prompts to one node.
MIN_MATCH = 0.05
# Cost of an evicted token, in computed tokens: the probability of another hit.
EVICTION_WEIGHT = 0.25
# Decode computes a prompt itself only if prefill would compute at least so many times its tokens.
MIN_SAVING = 2
UINT64 = 2**64 - 1

Cost = TypeVar("Cost", int, tuple[int, int])


class RoutingPolicy(Enum):
    """Policy that chooses one of several suitable nodes."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"  # the less loaded of two random nodes
    PREFIX_AWARE = "prefix_aware"  # fewest tokens to compute or move, including queued requests


@dataclass(frozen=True, slots=True)
class Routing:
    policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    # Decode computes a prompt itself if it misses fewer tokens than this, including those of other
    # such prompts under way there, and prefill misses many more. 0 turns this off.
    local_prefill_below: int = 0
    seed: int = 0  # of the random draws

    def __post_init__(self) -> None:
        if self.local_prefill_below < 0:
            raise InvalidConfig("local_prefill_below is below 0; 0 is off")


def parse_policy(name: str) -> RoutingPolicy:
    try:
        return RoutingPolicy(name)
    except ValueError:
        known = ", ".join(policy.value for policy in RoutingPolicy)
        raise InvalidConfig(f"unknown policy {name!r}; choose one of: {known}") from None


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """Inputs of a routing decision apart from the nodes."""

    prompt_token_ids: tuple[int, ...]
    number: int = 0  # counts the decisions: index for round robin and random draws
    prior_output_token_ids: tuple[int, ...] = ()
    model: str = ""
    cache_salt: str = ""
    revision: Revision | None = None  # that started the answer and alone may continue it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.prior_output_token_ids)


@dataclass(frozen=True, slots=True)
class Route:
    """Nodes of one attempt. Without a prefill node, the decode node computes the prompt too."""

    decode: Node
    prefill: Node | None
    local_reason: str = ""  # for having no prefill node
    num_missing_tokens: int = 0  # expected to be computed by the node that computes the prompt
    block_names: tuple[
        BlockHash, ...
    ] = ()  # prefix blocks that both nodes will report; empty if unused
    is_paced: bool = False  # decode computes the prompt in small chunks, though prefill could

    @property
    def addresses(self) -> tuple[str, ...]:
        if self.prefill is None:
            return (self.decode.address,)
        return self.decode.address, self.prefill.address


def choose(
    table: NodeTable,
    routing: Routing,
    request: RoutingRequest,
    without: frozenset[str] = frozenset(),
) -> Route:
    """Choose the nodes of a request, excluding the addresses in `without`.

    Raises NoNodes and IncompatibleNodes.
    """
    groups = [_filter_by_model(group, request.model) for group in table.groups(without)]
    groups = _filter_by_revision([group for group in groups if group.decodes], request.revision)
    if not groups:
        raise NoNodes("no decode node is reachable and open; start one, or try again later")
    paired = [group for group in groups if group.prefills]
    if not paired:
        # Prefer revisions that have had prefill nodes before.
        groups = [group for group in groups if table.was_paired(group)] or groups
    view = _build_view(table, routing, request)
    decode = pick(routing, view, _concatenate([group.decodes for group in paired or groups]))
    names = view.names
    if not paired:
        reason = _unpaired_reason(table, groups, request.revision)
        return Route(decode, None, reason, view.missing(decode), names)
    prefills = next(group.prefills for group in paired if decode in group.decodes)
    prefill = pick(routing, view, prefills)
    reason = _local_reason(routing, view, decode, prefill)
    if reason:
        return Route(decode, None, reason, view.missing_from_reported(decode), names, is_paced=True)
    return Route(decode, prefill, "", view.missing(prefill), names)


def _local_reason(routing: Routing, view: RoutingView, decode: Node, prefill: Node) -> str:
    """Return the reason to compute the prompt on decode instead of prefill; empty if there is none.

    It applies to the next turn of a conversation: only the decode node has the answer's KV.
    """
    on_decode, on_prefill = view.missing_from_reported(decode), view.missing(prefill)
    num_in_flight = view.table.node_load(decode).num_sent_tokens
    limit = routing.local_prefill_below
    if on_decode + num_in_flight >= limit or on_prefill < MIN_SAVING * on_decode:
        return ""
    return (
        f"{on_decode} tokens are missing on decode and {on_prefill} on prefill; "
        f"the limit is {limit}"
    )


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Node table with the prefix hits of one request."""

    table: NodeTable
    request: RoutingRequest
    names: tuple[BlockHash, ...] = ()
    # Cached tokens by address: reported ones, and those together with expected ones. None: unused.
    reported: Mapping[str, int] | None = None
    expected: Mapping[str, int] | None = None

    def num_requests(self, node: Node) -> int:
        return self.table.node_load(node).num_requests

    def missing(self, node: Node) -> int:
        return self.request.num_tokens - (self.expected or {}).get(node.address, 0)

    def missing_from_reported(self, node: Node) -> int:
        return self.request.num_tokens - (self.reported or {}).get(node.address, 0)

    def costs(self, nodes: Sequence[Node]) -> list[int]:
        """Estimate the tokens to compute or move on each node before the request's next token.

        Evicted cache blocks count too, since later requests must compute them again.
        """
        cached, num_tokens = self.expected or {}, self.request.num_tokens
        num_reported, min_match = self.table.prefixes.num_reported, MIN_MATCH * num_tokens
        costs = self._queued_costs(nodes)
        for place, node in enumerate(nodes):
            card, num_cached = node.card, cached.get(node.address, 0)
            num_missing = num_tokens - num_cached
            num_blank = card.num_blocks - num_reported(node.address)
            num_evicted = num_missing - num_blank * card.fingerprint.block_size
            if num_evicted > 0:
                costs[place] += int(EVICTION_WEIGHT * num_evicted)
            costs[place] += num_missing if num_cached >= min_match else num_tokens
        return costs

    def _queued_costs(self, nodes: Sequence[Node]) -> list[int]:
        """Estimate the cost of the requests that each node already has."""
        burdens = [self.table.node_load(node) for node in nodes]
        if nodes[0].card.role is NodeRole.DECODE:
            return [
                node_load.num_sent_tokens + DECODE_COST_TOKENS * node_load.num_requests
                for node_load in burdens
            ]
        num_tokens = self.request.num_tokens  # assumed for each request of other routers
        return [
            node_load.num_sent_tokens
            + num_tokens * max(0, node_load.num_reported - node_load.num_sent)
            for node_load in burdens
        ]


def pick(routing: Routing, view: RoutingView, nodes: Sequence[Node]) -> Node:
    """Choose one of `nodes`, which must not be empty and have one role."""
    number = view.request.number
    match routing.policy:
        case RoutingPolicy.ROUND_ROBIN:
            return nodes[number % len(nodes)]
        case RoutingPolicy.LEAST_LOADED:
            return _round_robin(_least(nodes, [view.num_requests(node) for node in nodes]), number)
        case RoutingPolicy.POWER_OF_TWO:
            return min(_draw_two(nodes, routing.seed, number), key=view.num_requests)
        case RoutingPolicy.PREFIX_AWARE:
            last_uses = [view.table.node_load(node).last_use for node in nodes]
            costs = list(zip(view.costs(nodes), last_uses, strict=True))
            return _round_robin(_least(nodes, costs), number)  # least recently used of the cheapest


def _least(nodes: Sequence[Node], costs: Sequence[Cost]) -> Sequence[Node]:
    least = min(costs)
    return [node for node, cost in zip(nodes, costs, strict=True) if cost == least]


def _round_robin(equal: Sequence[Node], number: int) -> Node:
    """Choose among equal nodes by round robin."""
    return equal[number % len(equal)]


def _draw_two(nodes: Sequence[Node], seed: int, number: int) -> tuple[Node, Node]:
    """Draw two nodes, different ones if there are two."""
    drawn = _splitmix64(seed ^ _splitmix64(number))
    first = drawn % len(nodes)
    step = 1 + (drawn >> 32) % (len(nodes) - 1) if len(nodes) > 1 else 0
    return nodes[first], nodes[(first + step) % len(nodes)]


def _splitmix64(number: int) -> int:
    """Hash a number, so that consecutive numbers give pseudo-random results."""
    mixed = (number + 0x9E3779B97F4A7C15) & UINT64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & UINT64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & UINT64
    return mixed ^ (mixed >> 31)


def _build_view(table: NodeTable, routing: Routing, request: RoutingRequest) -> RoutingView:
    if routing.policy is not RoutingPolicy.PREFIX_AWARE and not routing.local_prefill_below:
        return RoutingView(table, request)
    reported: dict[str, int] = {}
    expected: dict[str, int] = {}
    names: list[BlockHash] = []
    token_ids = request.prompt_token_ids + request.prior_output_token_ids
    for naming in table.namings:
        # The last token is always computed: its logits give the next one.
        usable = naming.names(token_ids[:-1], len(request.prompt_token_ids), request.cache_salt)
        match = table.prefixes.match(usable, needs_snapshot=naming.needs_snapshot)
        for hits, matched in zip((reported, expected), match, strict=True):
            hits.update((address, num * naming.block_size) for address, num in matched.items())
        # Of a prompt's snapshots, the one at its last block is certain to be attempted.
        names += usable[-1:] if naming.needs_snapshot else usable
    return RoutingView(table, request, tuple(names), reported, expected)


def _filter_by_model(group: NodeGroup, model: str) -> NodeGroup:
    if not model:
        return group
    decodes = tuple(node for node in group.decodes if node.card.model == model)
    return NodeGroup(group.prefills, decodes)


def _filter_by_revision(groups: list[NodeGroup], revision: Revision | None) -> list[NodeGroup]:
    """Return the groups of `revision`. Raises IncompatibleNodes if all have other weights."""
    if revision is None or not groups:
        return groups
    matching = [group for group in groups if group.decodes[0].revision == revision]
    if not matching:
        others = ", ".join(sorted({str(group.decodes[0].revision) for group in groups}))
        raise IncompatibleNodes(
            f"the answer was begun by model revision {revision}, and no decode node that is open "
            f"has it (there are: {others}): other weights must not go on with it; send it again"
        )
    return matching


def _concatenate(parts: Sequence[tuple[Node, ...]]) -> Sequence[Node]:
    return parts[0] if len(parts) == 1 else [node for part in parts for node in part]


def _unpaired_reason(
    table: NodeTable, groups: Sequence[NodeGroup], revision: Revision | None
) -> str:
    """Return the reason for having no prefill node. Raises IncompatibleNodes if none fits."""
    decodes = [node for group in groups for node in group.decodes]
    models = {node.card.model for node in decodes}
    known = [node for node in table.nodes if node.card.role is NodeRole.PREFILL]
    prefills = [
        node for node in known if node.card.model in models and revision in (None, node.revision)
    ]
    if not prefills:
        return "no prefill node of this model is reachable"
    if any(decode.is_kv_compatible_with(node) for decode in decodes for node in prefills):
        return "every compatible prefill node is draining, unhealthy or has just failed"
    raise IncompatibleNodes(_mismatch(prefills[0], decodes[0]))


def _mismatch(prefill: Node, decode: Node) -> str:
    """Describe the settings in which two nodes differ."""
    differing = [
        f"{name} {getattr(prefill.card.fingerprint, name)} and {getattr(on_decode, name)}"
        for on_decode in (decode.card.fingerprint,)
        for name in (field.name for field in fields(on_decode))
        if getattr(prefill.card.fingerprint, name) != getattr(on_decode, name)
    ]
    for name in ("block_bytes", "kv_transport"):
        prefill_value, decode_value = getattr(prefill.card, name), getattr(decode.card, name)
        if prefill_value != decode_value:
            differing.append(f"{name} {prefill_value} and {decode_value}")
    pair = f"prefill node {prefill.card.node_id} and decode node {decode.card.node_id}"
    return (
        f"no prefill node has KV that fits a decode node: {pair} differ in {'; '.join(differing)}"
    )
