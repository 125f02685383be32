"""Reachable nodes, and groups of nodes that fit each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from baton.core.legs import GENERATING, LegKind
from baton.core.logprobs import RAW_LOGPROBS
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.rpc.node_info import NodeCard

KvKind = tuple[Fingerprint, int, str]  # fingerprint, bytes of a block, KV transport
NodeKind = tuple[KvKind, str]  # and the logprobs mode


class Revision(NamedTuple):
    """Version of a model. Nodes of the same revision generate the same tokens for a request."""

    fingerprint: str  # of the configuration, the weights and the logits processors
    dtype: str
    logprobs_mode: str = RAW_LOGPROBS

    def __str__(self) -> str:
        mode = "" if self.logprobs_mode == RAW_LOGPROBS else f", {self.logprobs_mode}"
        return f"{self.fingerprint[:12]} ({self.dtype}{mode})"


@dataclass(frozen=True, slots=True)
class Node:
    """A reachable node."""

    address: str
    card: NodeCard

    @property
    def kv_kind(self) -> KvKind:
        """KV layout and transport. Nodes exchange KV as it is if theirs are equal."""
        return self.card.fingerprint, self.card.block_bytes, self.card.kv_transport

    @property
    def revision(self) -> Revision:
        fingerprint = self.card.fingerprint
        return Revision(fingerprint.model, fingerprint.layout.cache_dtype, self.card.logprobs_mode)

    @property
    def kind(self) -> NodeKind:
        """Return what must be equal on two nodes of a request, unless decode converts the KV."""
        return self.kv_kind, self.card.logprobs_mode

    def offers(self, kind: LegKind) -> bool:
        return kind in self.card.legs

    def takes_kv_of(self, prefill: Node) -> bool:
        """Return whether this node can decode from the KV of `prefill`."""
        return self.kind == prefill.kind or self.converts_kv_of(prefill)

    def converts_kv_of(self, prefill: Node) -> bool:
        """Return whether this node converts the KV of `prefill`, whose blocks differ."""
        ours, theirs = self.card, prefill.card
        has_room = theirs.block_bytes <= ours.kv_staging_bytes
        is_one_path = ours.kv_transport == theirs.kv_transport
        are_alike = is_one_path and ours.logprobs_mode == theirs.logprobs_mode
        return has_room and are_alike and theirs.fingerprint.is_convertible_into(ours.fingerprint)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Open nodes of one model that fit each other, in a stable order."""

    prefills: tuple[Node, ...]
    decodes: tuple[Node, ...]

    @property
    def model(self) -> str:
        return (self.decodes or self.prefills)[0].card.model


def group_by_kind(nodes: list[Node]) -> tuple[NodeGroup, ...]:
    """Group the nodes that take part in the generation of text."""
    nodes = [node for node in nodes if any(map(node.offers, GENERATING))]
    by_kind = sorted(nodes, key=_kind)  # stable within a kind
    groups = [_group(tuple(members)) for _, members in groupby(by_kind, _kind)]
    return tuple(_with_converted(group, nodes) for group in groups)


def _with_converted(group: NodeGroup, nodes: list[Node]) -> NodeGroup:
    """Add prefill nodes whose KV all decode nodes of the group convert, if it has no others."""
    if group.prefills or not group.decodes:
        return group
    prefills = [
        node for node in nodes if node.offers(LegKind.PREFILL) and node.card.model == group.model
    ]
    fitting = (
        node for node in prefills if all(each.converts_kv_of(node) for each in group.decodes)
    )
    return NodeGroup(tuple(fitting), group.decodes)


def _group(nodes: tuple[Node, ...]) -> NodeGroup:
    return NodeGroup(
        prefills=tuple(node for node in nodes if node.offers(LegKind.PREFILL)),
        decodes=tuple(node for node in nodes if node.offers(LegKind.DECODE)),
    )


def _kind(node: Node) -> tuple[str, str]:
    return node.card.model, repr(node.kind)
