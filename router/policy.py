"""Which nodes serve a request: one pure function of what is known of the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum

from engine.errors import InvalidConfig
from engine.hashing import BlockHash
from router.nodes import Node, NodeGroup, NodeTable, Revision
from serving.errors import IncompatibleNodes, NoNodes
from serving.node import NodeRole

# What a request that a decode node already serves weighs against prompt tokens that would not
# have to be moved there.
TOKENS_PER_DECODE = 64
# A shorter match, as a share of the prompt, does not sway the choice: a chat template that every
# prompt begins with would otherwise send all of them to one node.
MIN_MATCH = 0.05
# Tokens that an evicted token weighs: the chance that it would have been hit again.
EVICTION_WEIGHT = 0.25
# Decode computes what it lacks itself where prefill would compute at least so many times as much.
MIN_SAVING = 2
UINT64 = 2**64 - 1


class Policy(Enum):
    """How one of several nodes that could do it is chosen."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"  # the less loaded one of two drawn at random
    PREFIX_AWARE = "prefix_aware"  # fewest tokens to compute or to move, those ahead included


@dataclass(frozen=True, slots=True)
class Routing:
    policy: Policy = Policy.PREFIX_AWARE
    # Decode computes a prompt itself of which it lacks fewer tokens than this, those of other such
    # prompts included, and prefill lacks many more; 0 is off.
    local_prefill_below: int = 0
    seed: int = 0  # of the random draws

    def __post_init__(self) -> None:
        if self.local_prefill_below < 0:
            raise InvalidConfig("local_prefill_below is below 0; 0 is off")


def policy_named(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(policy.value for policy in Policy)
        raise InvalidConfig(f"no policy is called {name!r}; choose one of: {known}") from None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a choice may depend on, beside the nodes."""

    prompt_token_ids: tuple[int, ...]
    number: int = 0  # counts the choices: whose turn it is, and what is drawn
    prior_output_token_ids: tuple[int, ...] = ()
    model: str = ""
    cache_salt: str = ""
    revision: Revision | None = None  # that began the answer: no other may go on with it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.prior_output_token_ids)


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes that serve one try. Without a prefill node, decode computes the prompt too."""

    decode: Node
    prefill: Node | None
    local_reason: str = ""  # why there is no prefill node
    num_missing_tokens: int = 0  # that whoever computes the prompt is thought to lack
    block_names: tuple[BlockHash, ...] = ()  # what both nodes will have; empty if not needed
    is_paced: bool = False  # decode computes the prompt though prefill could: in small parts

    @property
    def addresses(self) -> tuple[str, ...]:
        nodes = (self.decode, self.prefill)
        return tuple(node.address for node in nodes if node is not None)


def choose(
    table: NodeTable, routing: Routing, ask: Ask, without: frozenset[str] = frozenset()
) -> Route:
    """Raises NoNodes and IncompatibleNodes. `without` names the addresses that just failed."""
    groups = [_serving(group, ask.model) for group in table.groups(without)]
    groups = _of_revision([group for group in groups if group.decodes], ask.revision)
    if not groups:
        raise NoNodes("no decode node is reachable and open; start one, or try again later")
    paired = [group for group in groups if group.prefills]
    if not paired:
        # A revision that has served with prefill nodes before one that never has.
        groups = [group for group in groups if table.was_paired(group)] or groups
    view = _view(table, routing, ask)
    decode = pick(routing, view, _joined([group.decodes for group in paired or groups]))
    names = view.names
    if not paired:
        reason = _why_not_paired(table, groups, ask.revision)
        return Route(decode, None, reason, view.missing(decode), names)
    prefills = next(group.prefills for group in paired if decode in group.decodes)
    prefill = pick(routing, view, prefills)
    reason = _why_local(routing, view, decode, prefill)
    if reason:
        return Route(decode, None, reason, view.surely_missing(decode), names, is_paced=True)
    return Route(decode, prefill, "", view.missing(prefill), names)


def _why_local(routing: Routing, view: View, decode: Node, prefill: Node) -> str:
    """Why decode computes what it lacks though prefill could; empty if it does not.

    After each turn of a conversation its decode node has the answer's KV, and no other node does.
    """
    few, many = view.surely_missing(decode), view.missing(prefill)
    num_underway = view.table.burden(decode).num_sent_tokens
    if few + num_underway >= routing.local_prefill_below or many < MIN_SAVING * few:
        return ""
    limit = routing.local_prefill_below
    return f"{few} tokens are missing on decode and {many} on prefill; the limit is {limit}"


@dataclass(frozen=True, slots=True)
class View:
    """The table as one request sees it."""

    table: NodeTable
    ask: Ask
    names: tuple[BlockHash, ...] = ()
    told: Mapping[str, int] | None = None  # tokens by address; None: not looked for
    likely: Mapping[str, int] | None = None

    def num_requests(self, node: Node) -> int:
        return self.table.burden(node).num_requests

    def missing(self, node: Node) -> int:
        return self.ask.num_tokens - (self.likely or {}).get(node.address, 0)

    def surely_missing(self, node: Node) -> int:
        return self.ask.num_tokens - (self.told or {}).get(node.address, 0)

    def costs(self, nodes: Sequence[Node]) -> list[int]:
        """Tokens to compute or to move before this request gets its next one, roughly.

        Evicting cached blocks counts too: later requests have to compute them again.
        """
        cached, num_tokens = self.likely or {}, self.ask.num_tokens
        num_told, min_match = self.table.prefixes.num_told, MIN_MATCH * num_tokens
        costs = self._costs_ahead(nodes)
        for place, node in enumerate(nodes):
            card, num_cached = node.card, cached.get(node.address, 0)
            num_missing = num_tokens - num_cached
            num_blank = card.num_blocks - num_told(node.address)
            num_evicted = num_missing - num_blank * card.fingerprint.block_size
            if num_evicted > 0:
                costs[place] += int(EVICTION_WEIGHT * num_evicted)
            costs[place] += num_missing if num_cached >= min_match else num_tokens
        return costs

    def _costs_ahead(self, nodes: Sequence[Node]) -> list[int]:
        """Those of the requests that are there already."""
        burdens = [self.table.burden(node) for node in nodes]
        if nodes[0].card.role is NodeRole.DECODE:
            return [
                burden.num_sent_tokens + TOKENS_PER_DECODE * burden.num_requests
                for burden in burdens
            ]
        num_tokens = self.ask.num_tokens  # requests of other routers are taken to be like this one
        return [
            burden.num_sent_tokens + num_tokens * max(0, burden.num_told - burden.num_sent)
            for burden in burdens
        ]


def pick(routing: Routing, view: View, nodes: Sequence[Node]) -> Node:
    """One of these, which are at least one and of one role."""
    number = view.ask.number
    match routing.policy:
        case Policy.ROUND_ROBIN:
            return nodes[number % len(nodes)]
        case Policy.LEAST_LOADED:
            return _next_of(_least(nodes, [view.num_requests(node) for node in nodes]), number)
        case Policy.POWER_OF_TWO:
            return min(_two(nodes, routing.seed, number), key=view.num_requests)
        case Policy.PREFIX_AWARE:
            cheapest = _least(nodes, view.costs(nodes))
            return _next_of(_least_recently_used(cheapest, view.table), number)


def _least(nodes: Sequence[Node], costs: Sequence[int]) -> Sequence[Node]:
    least = min(costs)
    return [node for node, one in zip(nodes, costs, strict=True) if one == least]


def _least_recently_used(nodes: Sequence[Node], table: NodeTable) -> Sequence[Node]:
    return _least(nodes, [table.burden(node).last_use for node in nodes])


def _next_of(equal: Sequence[Node], number: int) -> Node:
    """Equal ones take turns."""
    return equal[number % len(equal)]


def _two(nodes: Sequence[Node], seed: int, number: int) -> tuple[Node, Node]:
    """Two different ones, if there are two."""
    drawn = _mixed(seed ^ _mixed(number))
    first = drawn % len(nodes)
    step = 1 + (drawn >> 32) % (len(nodes) - 1) if len(nodes) > 1 else 0
    return nodes[first], nodes[(first + step) % len(nodes)]


def _mixed(number: int) -> int:
    """splitmix64: neighbouring numbers give results that look drawn at random."""
    mixed = (number + 0x9E3779B97F4A7C15) & UINT64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & UINT64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & UINT64
    return mixed ^ (mixed >> 31)


def _view(table: NodeTable, routing: Routing, ask: Ask) -> View:
    if routing.policy is not Policy.PREFIX_AWARE and not routing.local_prefill_below:
        return View(table, ask)
    told: dict[str, int] = {}
    likely: dict[str, int] = {}
    names: list[BlockHash] = []
    token_ids = ask.prompt_token_ids + ask.prior_output_token_ids
    for naming in table.namings:
        # The last token is always computed: it gives the next one.
        usable = naming.names(token_ids[:-1], len(ask.prompt_token_ids), ask.cache_salt)
        for found, match in ((told, table.prefixes.told), (likely, table.prefixes.likely)):
            found.update((who, num * naming.block_size) for who, num in match(usable).items())
        names += usable
    return View(table, ask, tuple(names), told, likely)


def _serving(group: NodeGroup, model: str) -> NodeGroup:
    if not model:
        return group
    decodes = tuple(node for node in group.decodes if node.card.model == model)
    return NodeGroup(group.prefills, decodes)


def _of_revision(groups: list[NodeGroup], revision: Revision | None) -> list[NodeGroup]:
    """Raises IncompatibleNodes if all that are left have other weights."""
    if revision is None or not groups:
        return groups
    alike = [group for group in groups if group.decodes[0].revision == revision]
    if not alike:
        others = ", ".join(sorted({str(group.decodes[0].revision) for group in groups}))
        raise IncompatibleNodes(
            f"the answer was begun by model revision {revision}, and no decode node that is open "
            f"has it (there are: {others}): other weights must not go on with it; send it again"
        )
    return alike


def _joined(parts: Sequence[tuple[Node, ...]]) -> Sequence[Node]:
    return parts[0] if len(parts) == 1 else [node for part in parts for node in part]


def _why_not_paired(
    table: NodeTable, groups: Sequence[NodeGroup], revision: Revision | None
) -> str:
    """Raises IncompatibleNodes, unless a prefill node is just not there."""
    decodes = [node for group in groups for node in group.decodes]
    models = {node.card.model for node in decodes}
    kinds = {node.kv_kind for node in decodes}
    known = [node for node in table.nodes if node.card.role is NodeRole.PREFILL]
    prefills = [
        node for node in known if node.card.model in models and revision in (None, node.revision)
    ]
    if not prefills:
        return "no prefill node of this model is reachable"
    if any(node.kv_kind in kinds for node in prefills):
        return "every prefill node that fits drains, is unwell or has just failed"
    raise IncompatibleNodes(_mismatch(prefills[0], decodes[0]))


def _mismatch(prefill: Node, decode: Node) -> str:
    """What a person must make alike."""
    differing = [
        f"{name} {getattr(prefill.card.fingerprint, name)} and {getattr(its, name)}"
        for its in (decode.card.fingerprint,)
        for name in (field.name for field in fields(its))
        if getattr(prefill.card.fingerprint, name) != getattr(its, name)
    ]
    for name in ("block_bytes", "kv_transport"):
        mine, its_own = getattr(prefill.card, name), getattr(decode.card, name)
        if mine != its_own:
            differing.append(f"{name} {mine} and {its_own}")
    who = f"prefill node {prefill.card.node_id} and decode node {decode.card.node_id}"
    return f"no prefill node's KV fits a decode node's: {who} differ in {'; '.join(differing)}"
