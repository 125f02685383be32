"""A node's description, totals and load, and their conversion to and from messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum

from baton.core.ids import Incarnation, NodeId
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.rpc.cached_prefixes import PrefixChanges
from baton.rpc.messages.conversion import (
    fingerprint_from,
    fingerprint_to,
    present,
    sampling_defaults_from,
    sampling_defaults_to,
)
from baton.v1 import node_pb2


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
        prefix_naming=_naming_from(message),
        version=message.version,
        sampling_defaults=sampling_defaults_from(message.sampling_defaults),
        max_num_seqs=message.max_num_seqs,
        max_sequence_len=message.max_sequence_len,
        kv_staging_bytes=message.kv_staging_bytes,
        num_host_blocks=message.num_host_blocks,
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
        prefix_naming=_naming_to(card.prefix_naming),
        version=card.version,
        sampling_defaults=sampling_defaults_to(card.sampling_defaults),
        max_num_seqs=card.max_num_seqs,
        max_sequence_len=card.max_sequence_len,
        kv_staging_bytes=card.kv_staging_bytes,
        num_host_blocks=card.num_host_blocks,
    )


def load_from(message: node_pb2.WatchResponse) -> NodeLoad:
    return NodeLoad(
        message.num_running,
        message.num_waiting,
        message.num_free_blocks,
        message.is_draining,
        totals_from(message.totals),
    )


def totals_from(message: node_pb2.NodeTotals) -> NodeTotals:
    return NodeTotals(
        message.num_prompt_tokens,
        message.num_hit_tokens,
        message.num_sampled_tokens,
        message.num_proposed_tokens,
        message.num_accepted_tokens,
        tuple(map(_tier_from, message.tiers)),
    )


def totals_to(totals: NodeTotals) -> node_pb2.NodeTotals:
    return node_pb2.NodeTotals(
        num_prompt_tokens=totals.num_prompt_tokens,
        num_hit_tokens=totals.num_hit_tokens,
        num_sampled_tokens=totals.num_sampled_tokens,
        num_proposed_tokens=totals.num_proposed_tokens,
        num_accepted_tokens=totals.num_accepted_tokens,
        tiers=[node_pb2.TierReport(**asdict(tier)) for tier in totals.tiers],
    )


def update_to(load: NodeLoad, changes: PrefixChanges | None = None) -> node_pb2.WatchResponse:
    return node_pb2.WatchResponse(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        is_draining=load.is_draining,
        prefixes=_changes_to(changes),
        totals=totals_to(load.totals),
    )


def changes_from(message: node_pb2.WatchResponse) -> PrefixChanges | None:
    if not message.HasField("prefixes"):
        return None
    prefixes = message.prefixes
    return PrefixChanges(
        prefixes.sequence,
        prefixes.is_snapshot,
        prefixes.stored,
        prefixes.removed,
    )


def _changes_to(changes: PrefixChanges | None) -> node_pb2.PrefixChanges | None:
    if changes is None:
        return None
    return node_pb2.PrefixChanges(
        sequence=changes.sequence,
        is_snapshot=changes.is_snapshot,
        stored=changes.stored,
        removed=changes.removed,
    )


def _tier_from(message: node_pb2.TierReport) -> TierReport:
    return TierReport(
        name=message.name,
        num_blocks=message.num_blocks,
        num_bytes=message.num_bytes,
        max_bytes=message.max_bytes,
        num_loaded_tokens=message.num_loaded_tokens,
        num_loaded_blocks=message.num_loaded_blocks,
        num_stored_blocks=message.num_stored_blocks,
        num_evicted_blocks=message.num_evicted_blocks,
        num_failed_blocks=message.num_failed_blocks,
    )


def _naming_from(message: node_pb2.GetNodeResponse) -> PrefixNaming | None:
    if not message.HasField("prefix_naming"):
        return None
    naming = message.prefix_naming
    limit = present(naming, "max_shareable_prompt_len", naming.max_shareable_prompt_len)
    return PrefixNaming(
        naming.block_size, naming.model_salt, naming.hash_seed, limit, naming.needs_snapshot
    )


def _naming_to(naming: PrefixNaming | None) -> node_pb2.PrefixNaming | None:
    if naming is None:
        return None
    return node_pb2.PrefixNaming(
        block_size=naming.block_size,
        model_salt=naming.model_salt,
        hash_seed=naming.hash_seed,
        max_shareable_prompt_len=naming.max_shareable_prompt_len,
        needs_snapshot=naming.needs_snapshot,
    )
