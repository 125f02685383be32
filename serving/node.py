"""A node as others see it: who it is, what it holds, how busy it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.v1 import node_pb2
from kv_transfer.messages import Fingerprint
from kv_transfer.types import Incarnation, NodeId
from serving.translate import fingerprint_from, fingerprint_to


class NodeRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


ROLE_TO_MESSAGE = {
    NodeRole.PREFILL: node_pb2.NODE_ROLE_PREFILL,
    NodeRole.DECODE: node_pb2.NODE_ROLE_DECODE,
}
ROLE_FROM_MESSAGE = {number: role for role, number in ROLE_TO_MESSAGE.items()}


@dataclass(frozen=True, slots=True)
class NodeCard:
    """What stays true of a node as long as its process lives."""

    node_id: NodeId
    incarnation: Incarnation
    role: NodeRole
    fingerprint: Fingerprint
    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_bytes: int
    kv_transport: str


@dataclass(frozen=True, slots=True)
class NodeLoad:
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    is_draining: bool = False


def card_from(message: node_pb2.GetNodeResponse) -> NodeCard:
    return NodeCard(
        node_id=NodeId(message.node_id),
        incarnation=Incarnation(message.incarnation),
        role=ROLE_FROM_MESSAGE[message.role],
        fingerprint=fingerprint_from(message.fingerprint),
        model=message.model,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_blocks=message.num_blocks,
        block_bytes=message.block_bytes,
        kv_transport=message.kv_transport,
    )


def card_to(card: NodeCard) -> node_pb2.GetNodeResponse:
    return node_pb2.GetNodeResponse(
        node_id=card.node_id,
        incarnation=card.incarnation,
        role=ROLE_TO_MESSAGE[card.role],
        fingerprint=fingerprint_to(card.fingerprint),
        model=card.model,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        num_blocks=card.num_blocks,
        block_bytes=card.block_bytes,
        kv_transport=card.kv_transport,
    )


def load_from(message: node_pb2.WatchResponse) -> NodeLoad:
    return NodeLoad(
        message.num_running, message.num_waiting, message.num_free_blocks, message.is_draining
    )


def load_to(load: NodeLoad) -> node_pb2.WatchResponse:
    return node_pb2.WatchResponse(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        is_draining=load.is_draining,
    )
