"""Policies that choose the nodes of a request from the node table, and its load on them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.legs import LegKind
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.routing_view import (
    PrefixHolder,
    RoutingRequest,
    RoutingView,
    build_view,
    find_holders,
)
from baton.router.routing.served_models import Node, NodeGroup, Revision
from baton.rpc.errors import IncompatibleNodes, NoNodes

# Decode computes a prompt itself only if prefill would compute at least so many times its tokens.
MIN_SAVING = 2
UINT64 = 2**64 - 1
FOREIGN_KV = "a vLLM server has computed the prompt"
ADVICE = "start one, or try again later"


@dataclass(frozen=True, slots=True)
class Leg:
    """Part of a request, and the node that serves it."""

    kind: LegKind
    node: Node
    sends: bool = False  # the KV of the prompt, to the leg that receives it
    receives_from: Node | None = None  # None: it computes the prompt


@dataclass(frozen=True, slots=True)
class Route:
    """Legs of one attempt: the first one computes the prompt, the last one ends the answer."""

    legs: tuple[Leg, ...]
    local_reason: str = ""  # for computing the prompt where the answer is generated
    num_missing_tokens: int = 0  # expected to be computed by the node that computes the prompt
    block_names: tuple[
        BlockHash, ...
    ] = ()  # prefix blocks that both nodes will report; empty if unused
    is_paced: bool = False  # decode computes the prompt in small chunks, though prefill could
    holder: PrefixHolder | None = None  # to pull from, for the node that computes the prompt
    encoder: Node | None = None  # encodes pictures for that node, which then needs no pixels

    @property
    def first(self) -> Leg:
        return self.legs[0]

    @property
    def last(self) -> Leg:
        return self.legs[-1]

    @property
    def is_split(self) -> bool:
        """True if one node computes the prompt and hands its KV to another."""
        return len(self.legs) > 1

    @property
    def addresses(self) -> tuple[str, ...]:
        encoders = () if self.encoder is None else (self.encoder.address,)
        return (*encoders, *(leg.node.address for leg in self.legs))


def handed_over(prefill: Node, decode: Node) -> tuple[Leg, Leg]:
    """Return the legs of a request whose KV one node sends to another."""
    return (
        Leg(LegKind.PREFILL, prefill, sends=True),
        Leg(LegKind.DECODE, decode, receives_from=prefill),
    )


def decoded_on(decode: Node) -> tuple[Leg]:
    """Return the only leg of a request that one node computes and answers."""
    return (Leg(LegKind.DECODE, decode),)


def choose(
    table: NodeTable,
    routing: Routing,
    request: RoutingRequest,
    without: frozenset[str] = frozenset(),
    unfit_holders: frozenset[str] = frozenset(),
) -> Route:
    """Choose the nodes of a request, excluding the addresses in `without`.

    KV is pulled neither from these nor from those in `unfit_holders`.

    Raises NoNodes and IncompatibleNodes, and InvalidRequest if no model is named where several
    could do the task.
    """
    route = _choose_legs(table, routing, request, without, unfit_holders)
    if not request.media:
        return route
    encoders = _encoders_for(table, route.first.node, without)
    if not encoders:
        return route
    least = _least(encoders, [table.node_load(node).num_requests for node in encoders])
    return replace(route, encoder=_round_robin(least, request.number))


def _choose_legs(
    table: NodeTable,
    routing: Routing,
    request: RoutingRequest,
    without: frozenset[str],
    unfit_holders: frozenset[str],
) -> Route:
    if request.model.base not in table.models:  # it arrived before its nodes did
        request = replace(request, model=_late_model(table, request))
    if request.task.is_pooling:
        return _choose_for_pooling(table, routing, request, without)
    groups = [group for group in table.groups(without) if group.model == request.model.base]
    groups = [group for group in _with_adapter(table, groups, request.model) if group.decodes]
    if request.media:
        groups = _with_towers(table, groups, without)
    groups = _filter_by_revision(groups, request.revision)
    if not groups:
        what = " that can get the KV of pictures" if request.media else ""
        raise NoNodes(f"no decode node{_adapter_of(request)}{what} is reachable and open; {ADVICE}")
    if request.has_foreign_kv:
        return _choose_for_foreign_kv(table, routing, request, groups)
    paired = [group for group in groups if group.prefills]
    if not paired:
        # Prefer revisions that have had prefill nodes before.
        groups = [group for group in groups if table.was_paired(group)] or groups
    view = _build_view(table, routing, request, without | unfit_holders)
    # What a decode node lacks is moved there by the prefill node.
    decode_view = replace(view, holders={}) if paired else view
    decodes = _concatenate([group.decodes for group in paired or groups])
    decode = pick(routing, decode_view, LegKind.DECODE, decodes)
    names = view.names
    if not paired:
        reason = _unpaired_reason(table, groups, request)
        holder = view.holder_for(decode)
        return Route(decoded_on(decode), reason, view.missing(decode), names, holder=holder)
    prefills = next(group.prefills for group in paired if decode in group.decodes)
    prefill = pick(routing, view, LegKind.PREFILL, prefills)
    reason = _local_reason(routing, view, decode, prefill)
    if reason:
        missing = view.missing_from_reported(decode)
        return Route(decoded_on(decode), reason, missing, names, is_paced=True)
    holder = view.holder_for(prefill)
    return Route(handed_over(prefill, decode), "", view.missing(prefill), names, holder=holder)


def _choose_for_foreign_kv(
    table: NodeTable, routing: Routing, request: RoutingRequest, groups: Sequence[NodeGroup]
) -> Route:
    """Choose the decode node that reads a prompt's KV from a vLLM server.

    It computes what follows the last full block, or all if the KV is gone.
    """
    view = RoutingView(table, request)
    decodes = _concatenate([group.decodes for group in groups])
    readers = [node for node in decodes if node.address in request.foreign_kv_readers]
    decode = pick(routing, view, LegKind.DECODE, readers or decodes)
    num_missing = 1 + (request.num_tokens - 1) % decode.card.fingerprint.layout.block_size
    return Route(decoded_on(decode), FOREIGN_KV, num_missing, is_paced=True)


def _late_model(table: NodeTable, request: RoutingRequest) -> ModelVariant:
    """Return the model of a request that could not be resolved when it arrived."""
    if request.model == ANY_MODEL:
        return table.find_model("", request.task)
    return table.resolve(request.model)


def _choose_for_pooling(
    table: NodeTable, routing: Routing, request: RoutingRequest, without: frozenset[str]
) -> Route:
    """Choose the node of a pooled prompt: if possible, one that does not decode."""
    nodes = [
        node
        for node in table.open_nodes(LegKind.ENCODE)
        if node.card.model == request.model.base
        and node.card.vector_size
        and request.revision in (None, node.revision)
        and node.address not in without
        and table.can_serve(node, request.model.adapter)
    ]
    if not nodes:
        raise NoNodes(f"no node that embeds{_adapter_of(request)} is reachable and open; {ADVICE}")
    nodes = [node for node in nodes if not node.offers(LegKind.DECODE)] or nodes
    view = replace(_build_view(table, routing, request, without), holders={})
    node = pick(routing, view, LegKind.ENCODE, nodes)
    return Route((Leg(LegKind.ENCODE, node),), "", view.missing(node), view.names)


def _local_reason(routing: Routing, view: RoutingView, decode: Node, prefill: Node) -> str:
    """Return the reason to compute the prompt on decode instead of prefill; empty if there is none.

    It applies to the next turn of a conversation: only the decode node has the answer's KV.
    """
    if decode.address == prefill.address:
        return "one node was chosen for both legs"
    if view.request.media and not decode.card.encodes_pictures:
        return ""
    on_decode, on_prefill = view.missing_from_reported(decode), view.prompt_cost(prefill)
    num_in_flight = view.table.node_load(decode).num_sent_tokens
    limit = routing.local_prefill_below
    if on_decode + num_in_flight >= limit or on_prefill < MIN_SAVING * on_decode:
        return ""
    return (
        f"{on_decode} tokens are missing on decode and about {on_prefill} on prefill; "
        f"the limit is {limit}"
    )


def pick(routing: Routing, view: RoutingView, kind: LegKind, nodes: Sequence[Node]) -> Node:
    """Choose the node of a leg from `nodes`, which must not be empty."""
    number = view.request.number
    match routing.policy:
        case RoutingPolicy.ROUND_ROBIN:
            return nodes[number % len(nodes)]
        case RoutingPolicy.LEAST_LOADED:
            return _round_robin(_least(nodes, [view.num_requests(node) for node in nodes]), number)
        case RoutingPolicy.POWER_OF_TWO:
            return min(_draw_two(nodes, routing.seed, number), key=view.num_requests)
        case RoutingPolicy.PREFIX_AWARE:
            cheapest = _least(nodes, view.costs(kind, nodes))
            last_uses = [view.table.node_load(node).last_use for node in cheapest]
            return _round_robin(_least(cheapest, last_uses), number)


def _least(nodes: Sequence[Node], costs: Sequence[int]) -> Sequence[Node]:
    least = min(costs)
    return [node for node, cost in zip(nodes, costs, strict=True) if cost == least]


def _round_robin(equal: Sequence[Node], number: int) -> Node:
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


def _build_view(
    table: NodeTable, routing: Routing, request: RoutingRequest, unfit_holders: frozenset[str]
) -> RoutingView:
    is_aware = routing.policy is RoutingPolicy.PREFIX_AWARE
    if not (is_aware or routing.local_prefill_below or routing.kv_pulls):
        return RoutingView(table, request)
    view = build_view(table, request)
    return replace(view, holders=find_holders(view, unfit_holders)) if routing.kv_pulls else view


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


def _with_adapter(
    table: NodeTable, groups: list[NodeGroup], model: ModelVariant
) -> list[NodeGroup]:
    """Return the groups without the nodes that cannot serve the adapter."""
    if not model.adapter.id:
        return groups

    def able(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(node for node in nodes if table.can_serve(node, model.adapter))

    return [NodeGroup(able(group.prefills), able(group.decodes)) for group in groups]


def _with_towers(
    table: NodeTable, groups: list[NodeGroup], without: frozenset[str]
) -> list[NodeGroup]:
    """Return the groups in which a node can compute pictures: a prefill node, or the decode node.

    It encodes them itself, or an encode node does that for it.
    """

    def able(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(
            node
            for node in nodes
            if node.card.encodes_pictures or _encoders_for(table, node, without)
        )

    groups = [NodeGroup(able(group.prefills), group.decodes) for group in groups]
    paired = [group for group in groups if group.prefills]
    if paired:
        return paired
    groups = [NodeGroup((), able(group.decodes)) for group in groups]
    return [group for group in groups if group.decodes]


def _encoders_for(table: NodeTable, node: Node, without: frozenset[str]) -> list[Node]:
    """Return the open nodes that encode pictures for this one, into blocks like its own."""
    if node.card.stored_rows is None:
        return []
    return [
        each
        for each in table.open_nodes(LegKind.ENCODE)
        if each.card.encodes_pictures
        and not each.card.vector_size  # else it encodes texts for clients, pictures for itself
        and each.card.stored_rows == node.card.stored_rows
        and each.kv_kind == node.kv_kind
        and each.address not in without
    ]


def _adapter_of(request: RoutingRequest) -> str:
    """Return the part of an error that names the adapter; empty if there is none."""
    adapter = request.model.adapter
    return f" with adapter {adapter.name!r}" if adapter.id else ""


def _unpaired_reason(table: NodeTable, groups: Sequence[NodeGroup], request: RoutingRequest) -> str:
    """Return the reason for having no prefill node. Raises IncompatibleNodes if none fits."""
    revision, adapter = request.revision, request.model.adapter
    decodes = [node for group in groups for node in group.decodes]
    models = {node.card.model for node in decodes}
    known = [node for node in table.nodes if node.offers(LegKind.PREFILL)]
    prefills = [
        node for node in known if node.card.model in models and revision in (None, node.revision)
    ]
    if not prefills:
        return "no prefill node of this model is reachable"
    prefills = [node for node in prefills if table.can_serve(node, adapter)]
    if not prefills:
        return f"no prefill node has adapter {adapter.name!r}"
    if any(decode.takes_kv_of(node) for decode in decodes for node in prefills):
        return "every compatible prefill node is draining, paused, unhealthy or has just failed"
    raise IncompatibleNodes(_mismatch(prefills[0], decodes[0]))


def _mismatch(prefill: Node, decode: Node) -> str:
    """Describe the settings in which two nodes differ."""
    on_prefill, on_decode = (node.card.fingerprint.settings() for node in (prefill, decode))
    differing = [
        f"{name} {value} and {on_decode[name]}"
        for name, value in on_prefill.items()
        if value != on_decode[name]
    ]
    for name in ("block_bytes", "kv_transport", "logprobs_mode"):
        prefill_value, decode_value = getattr(prefill.card, name), getattr(decode.card, name)
        if prefill_value != decode_value:
            differing.append(f"{name} {prefill_value} and {decode_value}")
    pair = f"prefill node {prefill.card.node_id} and decode node {decode.card.node_id}"
    return f"no prefill node fits a decode node: {pair} differ in {'; '.join(differing)}"
