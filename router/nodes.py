"""The nodes the router knows, how burdened they are, and which of them could serve. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from engine.hashing import PrefixNaming
from engine.sampling import NO_ADVICE, SamplingDefaults
from kv_transfer.messages import Fingerprint
from kv_transfer.types import NodeId
from router.node_sources import Member
from router.prefixes import NodePrefixes
from serving.node import NodeCard, NodeLoad, NodeRole
from serving.prefixes import PrefixChanges

KvKind = tuple[Fingerprint, int, str]  # with the bytes of a block and what carries it


class Revision(NamedTuple):
    """One version of a model: nodes of the same revision give a request the same tokens."""

    fingerprint: str  # of the configuration, the weights and the logits processors
    dtype: str

    def __str__(self) -> str:
        return f"{self.fingerprint[:12]} ({self.dtype})"


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can be reached."""

    address: str
    card: NodeCard

    @property
    def kv_kind(self) -> KvKind:
        """Nodes may share KV when these are equal."""
        return self.card.fingerprint, self.card.block_bytes, self.card.kv_transport

    @property
    def revision(self) -> Revision:
        return Revision(self.card.fingerprint.model, self.card.fingerprint.dtype)

    def may_share_kv_with(self, other: Node) -> bool:
        return self.kv_kind == other.kv_kind


@dataclass(slots=True)
class Burden:
    """What a node has to do, as it told and as this router knows."""

    told: NodeLoad = NodeLoad()
    num_sent: int = 0  # requests of this router that are under way there
    num_sent_tokens: int = 0  # of their prompts, that it has to compute
    num_ended: int = 0  # requests of this router that ended since it told
    last_use: int = 0  # number of the last request sent there, in NodeTable's count

    @property
    def num_told(self) -> int:
        return max(0, self.told.num_running + self.told.num_waiting - self.num_ended)

    def hear(self, told: NodeLoad) -> None:
        self.told = told
        self.num_ended = 0

    def end_one(self) -> None:
        """A request is over there, though the node's own word of it is still on its way."""
        self.num_sent -= 1
        self.num_ended += 1

    @property
    def num_requests(self) -> int:
        """What was sent is known at once; what others sent, when the node tells."""
        return max(self.num_told, self.num_sent)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Open nodes whose KV means the same, in a steady order."""

    prefills: tuple[Node, ...]
    decodes: tuple[Node, ...]


class NodeTable:
    """Joined, burdened and lost nodes, by address."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._burdens: dict[str, Burden] = {}
        self.watched: frozenset[Member] = frozenset()  # those that cannot be reached, too
        self._unready: set[str] = set()
        self._unlisted: frozenset[str] = frozenset()
        self._last_of_name: dict[NodeId, str] = {}
        self._groups: tuple[NodeGroup, ...] | None = ()  # None: to be made anew
        self._kinds_in_service: set[KvKind] = set()  # for which both roles were open at once
        self.namings: frozenset[PrefixNaming] = frozenset()  # one, unless models differ
        self.prefixes = NodePrefixes()
        self._num_uses = 0

    def join(self, address: str, card: NodeCard) -> None:
        self._nodes.pop(address, None)  # who joins anew is the last to have joined
        self._nodes[address] = Node(address, card)
        self._unready.discard(address)
        self._burdens[address] = Burden()
        self.prefixes.drop(address)
        self._renew()

    def note_load(self, address: str, load: NodeLoad) -> None:
        burden = self._burdens.get(address)
        if burden is None:
            return
        if load.is_draining != burden.told.is_draining:
            self._groups = None
        burden.hear(load)

    def note_ready(self, address: str, *, is_ready: bool) -> None:
        """As the node's own health has it."""
        if is_ready is (address in self._unready):
            self._groups = None
        (self._unready.discard if is_ready else self._unready.add)(address)

    def note_unlisted(self, addresses: frozenset[str]) -> None:
        """No source of nodes names these any more: they get nothing new."""
        if addresses != self._unlisted:
            self._unlisted, self._groups = addresses, None

    def note_prefixes(self, address: str, changes: PrefixChanges) -> None:
        """Raises PrefixGap."""
        if address in self._nodes:
            self.prefixes.take(address, changes)

    def lose(self, address: str) -> None:
        self._nodes.pop(address, None)
        self._burdens.pop(address, None)
        self._unready.discard(address)
        self.prefixes.drop(address)
        self._renew()

    def note_use(self, *nodes: Node) -> None:
        """A request is sent to these nodes."""
        self._num_uses += 1
        for node in nodes:
            self.burden(node).last_use = self._num_uses

    def burden(self, node: Node) -> Burden:
        """Of a node that is there; of one that was lost since, an empty one."""
        return self._burdens.get(node.address) or Burden()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def models(self) -> frozenset[str]:
        return frozenset(node.card.model for node in self._nodes.values())

    def max_model_len(self, model: str) -> int | None:
        """The longest that any decode node takes; None while there is none."""
        found = [
            node.card.max_model_len
            for node in self._nodes.values()
            if node.card.role is NodeRole.DECODE and model in ("", node.card.model)
        ]
        return max(found, default=None)

    def max_sequence_len(self, model: str) -> int | None:
        """Most tokens of prompt and answer that every decode node can hold; None without any."""
        found = [
            node.card.longest_sequence
            for node in self._nodes.values()
            if node.card.role is NodeRole.DECODE and model in ("", node.card.model)
        ]
        return min(found, default=None)

    def sampling_defaults(self, model: str) -> SamplingDefaults:
        """Of the model of this name, or of any if it is empty."""
        found = (node.card for node in self._nodes.values() if model in ("", node.card.model))
        card = next(found, None)
        return NO_ADVICE if card is None else card.sampling_defaults

    def is_open(self, node: Node) -> bool:
        """Whether it takes new requests. Of one name, the node that joined last does."""
        is_draining = self.burden(node).told.is_draining
        is_wanted = self.is_listed(node) and self.is_last_of_its_name(node)
        return self.is_ready(node) and is_wanted and not is_draining

    def is_ready(self, node: Node) -> bool:
        return node.address not in self._unready

    def is_listed(self, node: Node) -> bool:
        return node.address not in self._unlisted

    def is_last_of_its_name(self, node: Node) -> bool:
        return self._last_of_name.get(node.card.node_id) == node.address

    def open_nodes(self, role: NodeRole) -> list[Node]:
        """Those that take new requests, in a steady order."""
        found = [
            node for node in self._nodes.values() if node.card.role is role and self.is_open(node)
        ]
        return sorted(found, key=_address)

    @property
    def num_run_at_once(self) -> int:
        """Requests in the batches of all open decode nodes."""
        return sum(node.card.max_num_seqs for group in self.groups() for node in group.decodes)

    def partners(self, node: Node) -> list[Node]:
        """Open nodes of the other role whose KV fits."""
        return [
            other
            for other in self._all_open()
            if other.card.role is not node.card.role and other.may_share_kv_with(node)
        ]

    def groups(self, without: frozenset[str] = frozenset()) -> Sequence[NodeGroup]:
        """The open nodes, but for these addresses, by the kind of their KV."""
        if without:
            return _grouped([node for node in self._all_open() if node.address not in without])
        if self._groups is None:
            self._groups = _grouped(self._all_open())
            pairs = [group for group in self._groups if group.prefills and group.decodes]
            self._kinds_in_service.update(group.decodes[0].kv_kind for group in pairs)
        return self._groups

    def was_paired(self, group: NodeGroup) -> bool:
        """Whether a prefill node whose KV fits these has ever been open with a decode node."""
        return any(node.kv_kind in self._kinds_in_service for node in group.decodes)

    def _renew(self) -> None:
        self._groups = None
        self._last_of_name = {node.card.node_id: address for address, node in self._nodes.items()}
        namings = (node.card.prefix_naming for node in self._nodes.values())
        self.namings = frozenset(naming for naming in namings if naming is not None)

    def _all_open(self) -> list[Node]:
        return [node for role in NodeRole for node in self.open_nodes(role)]


def _grouped(nodes: list[Node]) -> tuple[NodeGroup, ...]:
    by_kind = sorted(nodes, key=_kind)  # keeps the order of those of one kind
    return tuple(_group(tuple(alike)) for _, alike in groupby(by_kind, _kind))


def _group(nodes: tuple[Node, ...]) -> NodeGroup:
    return NodeGroup(
        prefills=tuple(node for node in nodes if node.card.role is NodeRole.PREFILL),
        decodes=tuple(node for node in nodes if node.card.role is NodeRole.DECODE),
    )


def _kind(node: Node) -> str:
    return repr(node.kv_kind)


def _address(node: Node) -> str:
    return node.address
