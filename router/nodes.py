"""The nodes the router knows, and which of them could serve. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.node import NodeCard, NodeLoad, NodeRole


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can be reached."""

    address: str
    card: NodeCard
    load: NodeLoad = NodeLoad()

    @property
    def is_open(self) -> bool:
        return not self.load.is_draining

    def may_share_kv_with(self, other: Node) -> bool:
        mine, its = self.card, other.card
        same_shape = (mine.fingerprint, mine.block_bytes) == (its.fingerprint, its.block_bytes)
        return same_shape and mine.kv_transport == its.kv_transport


class NodeTable:
    """Joined, loaded and lost nodes, by address."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def join(self, address: str, card: NodeCard) -> None:
        self._nodes[address] = Node(address, card)

    def note_load(self, address: str, load: NodeLoad) -> None:
        node = self._nodes.get(address)
        if node is not None:
            self._nodes[address] = replace(node, load=load)

    def lose(self, address: str) -> None:
        self._nodes.pop(address, None)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def models(self) -> frozenset[str]:
        return frozenset(node.card.model for node in self._nodes.values())

    def open_nodes(self, role: NodeRole, without: frozenset[str] = frozenset()) -> list[Node]:
        """Those that take new requests, in a steady order."""
        found = [
            node
            for node in self._nodes.values()
            if node.card.role is role and node.is_open and node.address not in without
        ]
        return sorted(found, key=_address)


def _address(node: Node) -> str:
    return node.address
