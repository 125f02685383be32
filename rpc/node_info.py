"""A node's description, totals and load, and their mappers to messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import Incarnation, NodeId
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.rpc.cached_prefixes import PrefixChanges
from baton.rpc.messages.mapper import Mapper, enum_converter
from baton.v1 import node_pb2


class NodeRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeCard:
    """Properties of a node that are constant while its process lives."""

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
    prefix_naming: PrefixNaming | None = None  # None: prefix caching is off
    version: str = ""
    sampling_defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS
    max_num_seqs: int = 0  # batch size limit; 0: not reported
    max_sequence_len: int = 0  # limit by max_model_len and KV cache; 0: not reported
    kv_staging_bytes: int = 0  # in which a decode node takes blocks that it converts
    num_host_blocks: int = 0  # that fit into its host memory tier

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self.max_sequence_len or self.max_model_len

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks that the node holds at least: host memory has those of the KV cache as well."""
        return max(self.num_host_blocks, self.num_blocks)


@dataclass(frozen=True, slots=True)
class TierReport:
    """Contents of a tier below the KV cache, and its counters since the process started."""

    name: str
    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_loaded_tokens: int  # of prompts
    num_loaded_blocks: int
    num_stored_blocks: int
    num_evicted_blocks: int
    num_failed_blocks: int  # not loaded or stored, also because there was no room in time


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """Counters of a node since its process started, and the use of its tiers."""

    num_prompt_tokens: int = 0  # of requests that were given blocks
    num_hit_tokens: int = 0  # of num_prompt_tokens, found in the prefix cache
    num_sampled_tokens: int = 0
    num_proposed_tokens: int = 0  # draft tokens of speculative decoding
    num_accepted_tokens: int = 0  # of num_proposed_tokens
    tiers: tuple[TierReport, ...] = ()  # the fastest one first


@dataclass(frozen=True, slots=True)
class NodeLoad:
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    is_draining: bool = False
    # Sent along with other changes. They change with each step and trigger no update themselves.
    totals: NodeTotals = field(default=NodeTotals(), compare=False)


ROLE = enum_converter(NodeRole, node_pb2.NodeRole.DESCRIPTOR)
CARD = Mapper(NodeCard, node_pb2.GetNodeResponse)
TOTALS = Mapper(NodeTotals, node_pb2.NodeTotals)
LOAD = Mapper(NodeLoad, node_pb2.WatchResponse, unmapped=("prefixes",))
CHANGES = Mapper(PrefixChanges, node_pb2.PrefixChanges)


def update_to(load: NodeLoad, changes: PrefixChanges | None = None) -> node_pb2.WatchResponse:
    return LOAD.to_message(load, prefixes=None if changes is None else CHANGES.to_message(changes))


def changes_from(message: node_pb2.WatchResponse) -> PrefixChanges | None:
    return CHANGES.from_message(message.prefixes) if message.HasField("prefixes") else None
