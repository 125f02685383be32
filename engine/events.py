"""Events and statistics of the scheduler and the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.core.media import PictureInBlock
from baton.engine.kv_cache.block_hashes import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks were added to the prefix cache; each is the child of the one before it."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None  # None at the beginning of a sequence
    token_ids: tuple[int, ...]  # of all blocks; empty unless they are collected
    block_size: int
    root_hash: BlockHash | None = None  # parent of the sequence's first block, by its salt
    adapter: AdapterRef = NO_ADAPTER  # of the request that computed them
    pictures: tuple[tuple[PictureInBlock, ...], ...] = ()  # of each block; empty: all are text


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Statistics of the scheduler. Totals count from its start."""

    num_running: int
    num_ready: int  # KV landed, waiting for a place in the batch
    num_waiting: int
    num_waiting_for_remote_kvs: int
    num_waiting_for_fsm: int  # waiting for their grammars to be compiled
    num_blocks: int
    num_free_blocks: int  # including cached blocks without references
    num_cached_free_blocks: int  # the free blocks that are in the prefix cache
    num_granted_blocks: int  # blocks that peers can write
    num_pending_receives: int  # hand-offs whose blocks can be written
    num_pending_sends: int  # hand-offs whose blocks can be read
    total_preemptions: int
    total_prefix_query_tokens: int
    total_prefix_hit_tokens: int
    total_sampled_tokens: int
    total_proposed_tokens: int = 0  # by speculation
    total_accepted_tokens: int = 0  # of the proposed ones
    proposed_by_position: tuple[int, ...] = ()  # in the draft
    accepted_by_position: tuple[int, ...] = ()
    total_pulled_blocks: int = 0  # from peers
    total_failed_pull_blocks: int = 0
    num_encoder_rows: int = 0  # of pictures, in memory
    max_encoder_rows: int = 0  # that fit; 0: the model takes no pictures
    total_encoded_pictures: int = 0
    total_found_pictures: int = 0  # whose encodings were in memory
    total_read_pictures: int = 0  # whose encodings were in the KV cache
    # Of prompts, loaded from outside the KV cache, by source.
    total_loaded_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one KV group, or of recurrent states."""

    num_held: int  # by requests; a shared block counts for each
    total_hits: int  # blocks of prefix hits
    total_evictions: int  # blocks removed from the prefix cache
