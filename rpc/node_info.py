"""A node's description, totals and load, and their mappers to messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from baton.core.ids import Incarnation, NodeId
from baton.core.legs import Legs
from baton.core.media import StoredRows
from baton.core.output import RAW_LOGPROBS
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.rpc.adapters import ADAPTERS, NO_ADAPTERS, NodeAdapters
from baton.rpc.cached_prefixes import PrefixChanges
from baton.rpc.errors import OtherVersion
from baton.rpc.messages.mapper import Mapper
from baton.v1 import cluster_pb2, node_pb2

# Of node.proto. Routers and nodes of different versions refuse each other.
API_VERSION = 2
GET_NODE = node_pb2.GetNodeRequest(api_version=API_VERSION)
ONE_VERSION = "run routers and nodes of one version of the software"


@dataclass(frozen=True, slots=True)
class NodeCard:
    """Properties of a node. All but the legs are constant while its process lives."""

    node_id: NodeId
    incarnation: Incarnation
    legs: Legs  # that it offers now
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
    vector_size: int = 0  # of a pooled prompt; 0: the model does not pool
    has_labels: bool = False  # the vector has scores of labels; otherwise it is an embedding
    pools_tokens: bool = False  # only tokens have vectors, as in ColBERT's models
    generates: bool = True
    max_loras: int = 0  # different adapters in a batch; 0: it serves none
    logprobs_mode: str = RAW_LOGPROBS
    encodes_pictures: bool = False  # a node without the model's vision tower cannot
    encoding_row_bytes: int = 0  # of a picture's encoding; 0: its KV cache can store none
    follows_predictions: bool = False  # of clients, by speculative decoding
    kernels: str = ""  # that compute the model, such as avx512bf16 or torch; empty: not reported
    num_ranks: int = 1  # processes, each with a part of the model
    prompt_embeds_size: int = 0  # of embeddings in place of tokens; 0: it takes none

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self.max_sequence_len or self.max_model_len

    @property
    def stored_rows(self) -> StoredRows | None:
        """Return how its KV cache stores encodings of pictures; None: it stores none."""
        if not self.encoding_row_bytes or self.prefix_naming is None:
            return None
        block_size = self.fingerprint.layout.block_size
        return StoredRows(self.encoding_row_bytes, self.block_bytes, block_size)

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
    """Counters of a node since its process started, and the use of its other memory."""

    num_prompt_tokens: int = 0  # of requests that were given blocks
    num_hit_tokens: int = 0  # of num_prompt_tokens, found in the prefix cache
    num_sampled_tokens: int = 0
    num_proposed_tokens: int = 0  # draft tokens of speculative decoding
    num_accepted_tokens: int = 0  # of num_proposed_tokens
    proposed_by_position: tuple[int, ...] = ()  # num_proposed_tokens, by position in the draft
    accepted_by_position: tuple[int, ...] = ()
    tiers: tuple[TierReport, ...] = ()  # the fastest one first
    num_encoder_rows: int = 0  # of encodings of pictures, in memory
    max_encoder_rows: int = 0  # that fit; 0: the model takes no pictures

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache; None before the first prompt."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of speculated tokens that were accepted; None before the first one."""
        if not self.num_proposed_tokens:
            return None
        return self.num_accepted_tokens / self.num_proposed_tokens

    def tier_hit_rate(self, tier: TierReport) -> float | None:
        """Share of prompt tokens that were loaded from the tier; None before the first prompt."""
        return tier.num_loaded_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None


@dataclass(frozen=True, slots=True)
class NodeLoad:
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    is_draining: bool = False
    is_paused: bool = False
    legs: Legs | None = None  # that it offers; None: as before
    # They change with each step: sent along with other changes, and alone once a second at most.
    totals: NodeTotals = field(default=NodeTotals(), compare=False)

    @property
    def refuses_requests(self) -> bool:
        return self.is_draining or self.is_paused


class NodeAvailability(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    PAUSED = "paused"
    NOT_READY = "not ready"
    UNLISTED = "unlisted"
    REPLACED = "replaced"
    UNREACHABLE = "unreachable"
    MISMATCHED = "mismatched"  # a vLLM server whose KV no decode node can use


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Node as a router sees it. An unreachable one has only legs, address and state."""

    legs: Legs  # that it offers, or for which it is listed
    address: str
    state: NodeAvailability
    node_id: str = ""
    incarnation: str = ""
    model: str = ""
    version: str = ""
    kv_transport: str = ""
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_sent: int = 0  # by this router, not ended yet
    totals: NodeTotals = NodeTotals()
    adapters: NodeAdapters = NO_ADAPTERS
    max_loras: int = 0
    reason: str = ""  # why a vLLM server is not used, or not with all decode nodes
    kernels: str = ""
    num_ranks: int = 1


CARD = Mapper(NodeCard, node_pb2.GetNodeResponse, unmapped=("api_version",))
STATUS = Mapper(NodeStatus, cluster_pb2.NodeReport)
LOAD = Mapper(NodeLoad, node_pb2.WatchResponse, unmapped=("prefixes", "adapters"))
CHANGES = Mapper(PrefixChanges, node_pb2.PrefixChanges)


def card_to(card: NodeCard) -> node_pb2.GetNodeResponse:
    return CARD.to_message(card, api_version=API_VERSION)


def check_api_version(request: node_pb2.GetNodeRequest) -> None:
    """Raises OtherVersion."""
    if request.api_version != API_VERSION:
        raise OtherVersion(
            f"the caller speaks version {request.api_version or 1} of the API of nodes, and this "
            f"node {API_VERSION}; {ONE_VERSION}"
        )


def card_from(message: node_pb2.GetNodeResponse) -> NodeCard:
    """Raises OtherVersion if the node speaks another version of the API of nodes."""
    if message.api_version != API_VERSION:
        raise OtherVersion(
            f"node {message.node_id} (version {message.version}) speaks version "
            f"{message.api_version or 1} of the API of nodes, and this process {API_VERSION}; "
            f"{ONE_VERSION}"
        )
    return CARD.from_message(message)


def update_to(
    load: NodeLoad,
    changes: PrefixChanges | None = None,
    adapters: NodeAdapters | None = None,
) -> node_pb2.WatchResponse:
    return LOAD.to_message(
        load,
        prefixes=None if changes is None else CHANGES.to_message(changes),
        adapters=None if adapters is None else ADAPTERS.to_message(adapters),
    )


def changes_from(message: node_pb2.WatchResponse) -> PrefixChanges | None:
    return CHANGES.from_message(message.prefixes) if message.HasField("prefixes") else None


def adapters_from(message: node_pb2.WatchResponse) -> NodeAdapters | None:
    """Return the adapters of a node; None if they are as in the message before."""
    return ADAPTERS.from_message(message.adapters) if message.HasField("adapters") else None
