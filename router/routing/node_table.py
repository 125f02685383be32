"""Node table: the known nodes, their load, and whether they accept requests. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.core.ids import ANY_MODEL, AdapterRef, ModelVariant, NodeId
from baton.core.legs import LegKind
from baton.core.request import GENERATE, Task
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.router.routing.cluster_adapters import ClusterAdapters
from baton.router.routing.prefix_index import NodePrefixes
from baton.router.routing.served_models import (
    KvKind,
    Node,
    NodeGroup,
    NodeKind,
    ServedModel,
    ServedModels,
    group_by_kind,
)
from baton.rpc.adapters import NameOrder, NodeAdapters
from baton.rpc.cached_prefixes import PrefixChanges
from baton.rpc.node_info import NodeCard, NodeLoad


@dataclass(slots=True)
class LoadEstimate:
    """Load of a node, as reported by it and as known from this router's own requests."""

    reported: NodeLoad = NodeLoad()
    num_sent: int = 0  # requests of this router in flight there
    num_sent_tokens: int = 0  # prompt tokens of these that the node has yet to compute
    num_ended: int = 0  # requests of this router that ended since the last report
    last_use: int = 0  # NodeTable's sequence number of the last request sent there
    sent_adapters: Counter[str] = field(default_factory=Counter)  # ids, of those in flight

    @property
    def num_reported(self) -> int:
        """Requests on the node by its last report, less those of this router that ended since."""
        return max(0, self.reported.num_running + self.reported.num_waiting - self.num_ended)

    def note_report(self, reported: NodeLoad) -> None:
        self.reported = reported
        self.num_ended = 0

    def note_sent(self, adapter: str) -> None:
        """Count a request of this router, with the id of its adapter."""
        self.num_sent += 1
        if adapter:
            self.sent_adapters[adapter] += 1

    def note_request_ended(self, adapter: str) -> None:
        """Count a request that ended on the node before the node has reported it."""
        self.num_sent -= 1
        self.num_ended += 1
        if adapter:
            self.sent_adapters[adapter] -= 1
            if not self.sent_adapters[adapter]:
                del self.sent_adapters[adapter]

    @property
    def num_requests(self) -> int:
        """Requests on the node: own ones at once, those of other routers when reported."""
        return max(self.num_reported, self.num_sent)


class NodeTable:
    """Nodes by address, with their load, health and prefixes."""

    def __init__(self, expected_models: Collection[str] = ()) -> None:
        """`expected_models` are names of models that have nodes, now or soon."""
        self.expected_models = expected_models
        self._nodes: dict[str, Node] = {}
        self._loads: dict[str, LoadEstimate] = {}
        # Addresses, also unreachable ones, and the leg for which each is listed.
        self.watched: Mapping[str, LegKind] = {}
        self._unready: set[str] = set()
        self._unlisted: frozenset[str] = frozenset()
        self._last_of_name: dict[NodeId, str] = {}
        self._kind_by_address: dict[str, int] = {}
        self._number_by_kind: dict[tuple[KvKind, PrefixNaming | None], int] = {}
        self._groups: tuple[NodeGroup, ...] | None = ()  # None: out of date
        # That have had open nodes for both legs, by model.
        self._kinds_in_service: set[tuple[str, NodeKind]] = set()
        self._with_decode_nodes: set[str] = set()  # models that have, or have had, some
        self.served = ServedModels(expected=expected_models)
        self._namings: Mapping[str, frozenset[PrefixNaming]] = {}  # by model
        self.prefixes = NodePrefixes()
        self.adapters = ClusterAdapters()
        self._num_uses = 0

    def join(self, address: str, card: NodeCard) -> None:
        self._nodes.pop(address, None)  # a node that joins again moves to the end
        node = self._nodes[address] = Node(address, card)
        kind, number = (node.kv_kind, card.prefix_naming), len(self._number_by_kind)
        self._kind_by_address[address] = self._number_by_kind.setdefault(kind, number)
        self._unready.discard(address)
        self._loads[address] = LoadEstimate()
        self.prefixes.drop(address)
        self.adapters.join(address, card.model)
        self._rebuild()

    def note_load(self, address: str, load: NodeLoad) -> None:
        """Record what a node reports: its load, and the legs that it offers."""
        node_load = self._loads.get(address)
        if node_load is None:
            return
        if load.refuses_requests != node_load.reported.refuses_requests:
            self._groups = None
        node_load.note_report(load)
        node = self._nodes[address]
        if load.legs is not None and load.legs != node.card.legs:
            self._nodes[address] = Node(address, replace(node.card, legs=load.legs))
            self._rebuild()

    def note_ready(self, address: str, *, is_ready: bool) -> None:
        """Record the health that the node reports."""
        if is_ready is (address in self._unready):
            self._groups = None
        (self._unready.discard if is_ready else self._unready.add)(address)

    def note_unlisted(self, addresses: frozenset[str]) -> None:
        """Set the addresses that no source lists any more: they get no new requests."""
        if addresses != self._unlisted:
            self._unlisted, self._groups = addresses, None

    def note_prefixes(self, address: str, changes: PrefixChanges) -> None:
        """Apply changes of a node's prefix cache. Raises PrefixGap."""
        if address in self._nodes:
            self.prefixes.take(address, changes)

    def note_adapters(self, address: str, adapters: NodeAdapters) -> None:
        """Record all adapters of a node."""
        if address in self._nodes and self.adapters.note(address, adapters):
            self._rebuild_served()

    def note_name(self, model: str, order: NameOrder) -> None:
        """Record an order about the name of an adapter, before nodes report it."""
        self.adapters.merge(model, order)
        self._rebuild_served()

    def lose(self, address: str) -> None:
        self._nodes.pop(address, None)
        self._loads.pop(address, None)
        self._kind_by_address.pop(address, None)
        self._unready.discard(address)
        self.prefixes.drop(address)
        self.adapters.lose(address)
        self._rebuild()

    def note_use(self, *loads: LoadEstimate) -> None:
        self._num_uses += 1
        for load in loads:
            load.last_use = self._num_uses

    def node_load(self, node: Node) -> LoadEstimate:
        """Return the load of a node; an empty one if the node was lost."""
        return self._loads.get(node.address) or LoadEstimate()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    def node_at(self, address: str) -> Node | None:
        return self._nodes.get(address)

    def kind_number(self, address: str) -> int | None:
        """Return a number that nodes have in common if they exchange KV under the same names."""
        return self._kind_by_address.get(address)

    @property
    def num_kinds(self) -> int:
        return len(self._number_by_kind)

    @property
    def models(self) -> Mapping[str, ModelVariant]:
        """Served base models by name."""
        return self.served.bases

    def find_model(self, name: str, task: Task = GENERATE) -> ModelVariant:
        """Resolve a name that a client sent: once per request, when it is parsed.

        An unknown name stands for a base model that is not served, an empty one for the only model
        that can do the task. Raises InvalidRequest if there are several.
        """
        return self.served.find(name, task)

    def resolve(self, model: ModelVariant) -> ModelVariant:
        """Return the adapter of a name that arrived before a node that knows it."""
        is_known = model.base in self.models
        return model if is_known else self.served.variants.get(model.base, model)

    def served_model(self, model: ModelVariant = ANY_MODEL) -> ServedModel:
        """Return a model's limits and defaults, or those over all models."""
        return self.served.of(model)

    def namings(self, model: ModelVariant) -> frozenset[PrefixNaming]:
        """Return how a model's nodes name blocks: in one way, unless its revisions differ."""
        if model != ANY_MODEL:
            return self._namings.get(model.base, frozenset())
        return frozenset().union(*self._namings.values())

    def is_open(self, node: Node) -> bool:
        """Return whether the node accepts new requests. Of equal names, the last to join does."""
        is_current = self.is_listed(node) and self.is_latest_of_name(node)
        is_willing = not self.node_load(node).reported.refuses_requests
        return self.is_ready(node) and is_current and is_willing

    def is_ready(self, node: Node) -> bool:
        return node.address not in self._unready

    def is_listed(self, node: Node) -> bool:
        return node.address not in self._unlisted

    def is_latest_of_name(self, node: Node) -> bool:
        return self._last_of_name.get(node.card.node_id) == node.address

    def can_serve(self, node: Node, adapter: AdapterRef) -> bool:
        """Return whether the node has the adapter, or can read it from its folder."""
        if not adapter.id:
            return True
        known = self.adapters.at(node.address).known
        return adapter.id in known or bool(adapter.path and node.card.max_loras)

    def open_nodes(self, kind: LegKind | None = None) -> list[Node]:
        """Return the nodes that accept new requests, or new legs of a kind, in a stable order."""
        nodes = (node for node in self._nodes.values() if kind is None or node.offers(kind))
        return sorted(filter(self.is_open, nodes), key=_address)

    def batch_slots(self) -> Mapping[str, int]:
        """Return the batch slots of each model's open nodes.

        They are those of decode nodes, and of nodes that only encode.
        """
        slots = dict.fromkeys(self.models, 0)
        decodes = [node for group in self.groups() for node in group.decodes]
        encoding = [node for node in self.open_nodes(LegKind.ENCODE) if not node.card.generates]
        for node in (*decodes, *encoding):
            slots[node.card.model] += node.card.max_num_seqs
        return slots

    def pairs_with(self, node: Node) -> list[tuple[Node, Node]]:
        """Return the open pairs that the node makes: the one that decodes, and the one that sends.

        Both have the same model, and the first takes KV of the second.
        """
        others = [each for each in self.open_nodes() if each.card.model == node.card.model]
        pairs = [(node, each) for each in others] + [(each, node) for each in others]
        return [
            (decode, prefill)
            for decode, prefill in pairs
            if decode.offers(LegKind.DECODE)
            and prefill.offers(LegKind.PREFILL)
            and decode.address != prefill.address
            and decode.takes_kv_of(prefill)
        ]

    def groups(self, without: frozenset[str] = frozenset()) -> Sequence[NodeGroup]:
        """Return the open nodes, except those addresses, grouped by model and compatible KV."""
        if without:
            return group_by_kind(
                [node for node in self.open_nodes() if node.address not in without]
            )
        if self._groups is None:
            self._groups = group_by_kind(self.open_nodes())
            pairs = [group for group in self._groups if group.prefills and group.decodes]
            self._kinds_in_service.update((group.model, group.decodes[0].kind) for group in pairs)
        return self._groups

    def was_paired(self, group: NodeGroup) -> bool:
        """Return whether this kind of node has ever had open nodes for both legs."""
        return any((group.model, node.kind) in self._kinds_in_service for node in group.decodes)

    def _rebuild(self) -> None:
        self._groups = None
        self._last_of_name = {node.card.node_id: address for address, node in self._nodes.items()}
        cards = [node.card for node in self._nodes.values()]
        self._with_decode_nodes |= {card.model for card in cards if LegKind.DECODE in card.legs}
        self._rebuild_served()
        self._namings = {
            name: frozenset(
                card.prefix_naming for card in cards if card.model == name and card.prefix_naming
            )
            for name in self.models
        }

    def _rebuild_served(self) -> None:
        cards = [node.card for node in self._nodes.values()]
        self.served = ServedModels(
            cards, self._with_decode_nodes, self.adapters.variants, self.expected_models
        )


def _address(node: Node) -> str:
    return node.address
