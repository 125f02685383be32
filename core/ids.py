"""Ids and names of requests, models, blocks, hand-offs and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType

from baton.core.media import MediaSegment

BlockId = NewType("BlockId", int)
NodeId = NewType("NodeId", str)
Incarnation = NewType("Incarnation", str)

RequestId = NewType("RequestId", str)
BlockName = (
    bytes  # stands for the tokens of a block, all tokens before it, the model and the KV group
)

NO_BLOCK = BlockId(-1)  # in a block table: no later token attends to these tokens


def existing_blocks(block_tables: Iterable[Iterable[BlockId]]) -> Iterator[BlockId]:
    """Yield the blocks of these tables, table after table."""
    for table in block_tables:
        yield from (block_id for block_id in table if block_id != NO_BLOCK)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Names a LoRA adapter, and where nodes find it."""

    name: str = ""  # in requests
    id: str = ""  # hash of its config and weights, by which KV is shared; empty: no adapter
    path: str = ""  # relative to the --lora-root of each node; empty: nodes cannot load it later


NO_ADAPTER = AdapterRef()


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A served model: base weights, and an adapter of them."""

    base: str = ""  # empty: any that is served
    adapter: AdapterRef = NO_ADAPTER

    @property
    def name(self) -> str:
        """Name in requests and in the list of models."""
        return self.adapter.name or self.base


ANY_MODEL = ModelVariant()


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Keys of a request besides its tokens: prompts share KV only where all of them are equal."""

    cache_salt: str = ""  # empty: shared by all clients
    adapter: str = ""  # id of that which computes the KV; empty: none
    media: tuple[MediaSegment, ...] = ()  # enter the names of the blocks that they touch


NO_PREFIX_KEYS = PrefixKeys()


@dataclass(frozen=True, slots=True, order=True)
class HandoffId:
    """One attempt to transfer one sequence's KV. The router increments `attempt` per retry.

    Also one run of a pull: the name of the process that pulls, and a number.
    """

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class Peer:
    """Node on the other side of a hand-off, with the address of its control link."""

    node_id: NodeId
    address: str  # host:port of its gRPC server
