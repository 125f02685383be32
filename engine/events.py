"""What the scheduler and the KV cache tell about themselves, as values in the past tense."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.hashing import BlockHash
from engine.request import RequestId


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks can be hit from now on; each is the child of the one before it."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None  # None: they begin a sequence
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class RequestEventKind(Enum):
    QUEUED = "queued"
    GRANTED = "granted"  # its KV may be written by the peer
    LANDED = "landed"
    LOST = "lost"  # its KV will not come
    SCHEDULED = "scheduled"  # entered the batch, new or resumed
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    request_id: RequestId
    kind: RequestEventKind
    at_s: float


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot; the totals count from the start."""

    num_running: int
    num_ready: int  # KV landed, no place in the batch yet
    num_waiting: int
    num_waiting_for_remote_kvs: int
    num_waiting_for_fsm: int  # their grammars are being compiled
    num_blocks: int
    num_free_blocks: int  # cached ones that nobody uses are free
    num_cached_free_blocks: int  # of these, those that a prefix could still hit
    num_granted_blocks: int  # that peers may still write
    num_pending_receives: int  # hand-offs whose blocks may still be written
    num_pending_sends: int  # hand-offs whose blocks may still be read
    total_preemptions: int
    total_prefix_query_tokens: int
    total_prefix_hit_tokens: int
    total_unknown_kv_reports: int
    total_sampled_tokens: int
    total_proposed_tokens: int = 0  # by speculation
    total_accepted_tokens: int = 0  # of these: they came true
