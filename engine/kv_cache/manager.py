"""KV cache of requests: prefix lookup, block tables and registration of full blocks.

A request has one block table for each KV group of the model. Tables have one entry per block of
tokens, so all of a request's tables have the same length; entries of blocks that no later token
attends to are NO_BLOCK. A request of a model with recurrent layers also has a recurrent state, of a
fixed number of blocks, and its prefixes are cached where a snapshot of that state is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from baton.core.ids import NO_BLOCK, BlockId, BlockName, RequestId
from baton.core.kv_hints import BlockHints
from baton.engine.errors import BlocksUnaccounted
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash, extend_hashes
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.config import CacheConfig
from baton.engine.kv_cache.external_prefix import (
    SNAPSHOT,
    ExternalPrefix,
    FirstAnswers,
    Holder,
    HoldsAll,
    PoolAndExternal,
    SnapshotsAndExternal,
    external_prefix,
)
from baton.engine.kv_cache.group_stats import GroupCounters, GroupStats
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_search import (
    PrefixHit,
    PrefixSearch,
    is_of_first_group,
    name_in_group,
)
from baton.engine.kv_cache.recurrent_state import (
    snapshot_end,
)
from baton.engine.kv_cache.snapshot_calendar import SnapshotCalendar
from baton.engine.kv_cache.state_memory import StateMemory
from baton.engine.kv_cache.token_group import TokenGroup
from baton.engine.kv_cache.transfer_order import TransferOrder
from baton.engine.plan import BlockIds, BlockTables, StateSnapshot
from baton.kv_transfer.external_kv import ExternalKv


class KvCache:
    def __init__(self, config: CacheConfig, external: ExternalKv | None = None) -> None:
        self._config = config
        self._naming = config.naming
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self._groups = tuple(
            TokenGroup(number, group.spec, config.block_size, self.pool)
            for number, group in enumerate(config.groups)
        )
        self._forgetful = [group for group in self._groups if group.spec.forgets]
        self._state = StateMemory(config.num_state_blocks, config.block_size, self.pool)
        self._calendar = SnapshotCalendar(
            self, self.pool, config.num_state_blocks, config.block_size
        )
        self._nothing: BlockTables = tuple(() for _ in self._groups)
        self._specs = tuple(group.spec for group in self._groups)
        self.transfer_order = TransferOrder(self._specs, config.block_size)
        snapshots = self._state.snapshots if self._state.num_blocks else None
        self._search = PrefixSearch(self.pool, self._specs, config.block_size, snapshots)
        self._promised_search = self._search_with(HoldsAll())
        self._external: FirstAnswers | None = None
        if external is not None:
            self._external = FirstAnswers(external)
            self._external_search = self._search_with(self._external)
        self._unstored: deque[tuple[BlockHash, BlockId, BlockHints]] = deque()  # not yet outside
        self._events: list[KvEvent] = []
        self._memories: tuple[TokenGroup | StateMemory, ...] = (
            (*self._groups, self._state) if self._state.num_blocks else self._groups
        )
        self._counters = GroupCounters([str(memory) for memory in self._memories])
        self.total_query_tokens = 0
        self.total_hit_tokens = 0

    def root_hash(self, cache_salt: str, num_prompt_tokens: int) -> BlockHash:
        return self._naming.root(cache_salt, num_prompt_tokens)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_cached_snapshots(self) -> int:
        return len(self._state.snapshots)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold these tokens in one group."""
        return -(-num_tokens // self.block_size)

    def capacity(self, held: HeldKv) -> int:
        return held.num_blocks * self.block_size

    def find_prefix(
        self, held: HeldKv, max_num_tokens: int, *, continues_at: int | None = None
    ) -> PrefixHit:
        """Return the longest cached prefix of at most `max_num_tokens` tokens.

        `continues_at` is the position of the next token that is computed here, if it is not the
        token after the prefix. Groups with windows need only the blocks that this token sees.
        """
        num_blocks = 0
        if self._config.enable_prefix_caching:
            self._extend_hashes(held)
            num_blocks = max_num_tokens // self.block_size
        return self._search.find(held.block_hashes[:num_blocks], continues_at)

    def missing_hash(self, held: HeldKv, num_hits: int, max_num_tokens: int) -> BlockHash | None:
        """Return the hash of the first block that `find_prefix` did not find, or None.

        Once that block is cached, the prefix is longer even if no block was released. With
        recurrent layers, prefixes end at snapshots, which are released once they are cached.
        """
        if num_hits >= max_num_tokens // self.block_size or not self._config.enable_prefix_caching:
            return None
        if self._state.num_blocks:
            return None
        return held.block_hashes[num_hits]

    def num_missing(self, held: HeldKv, hit: PrefixHit, *, continues_at: int | None = None) -> int:
        """Return the number of blocks that `admit` has to find, apart from the prefix."""
        num_blocks = self.num_blocks_for(held.num_tokens)
        position = self._position(hit, continues_at)
        num_allocated = sum(
            group.num_allocated(num_blocks, hit.num_blocks, position) for group in self._groups
        )
        num_allocated += self._state.num_allocated
        return num_allocated + self.pool.num_free_among(hit.block_ids)

    def admit(
        self,
        held: HeldKv,
        hit: PrefixHit,
        *,
        spare: int = 0,
        continues_at: int | None = None,
    ) -> bool:
        """Allocate all blocks for a request that holds none. Returns False if there are too few.

        At least `spare` blocks must remain free.
        """
        if self.num_missing(held, hit, continues_at=continues_at) + spare > self.pool.num_free:
            return False
        self.pool.hold(hit.block_ids)
        num_blocks = self.num_blocks_for(held.num_tokens)
        position = self._position(hit, continues_at)
        held.block_tables = tuple(
            group.table(table, num_blocks, position, self._allocate)
            for group, table in zip(self._groups, hit.block_tables, strict=True)
        )
        held.num_computed_tokens = hit.num_blocks * self.block_size
        held.num_registered_blocks = hit.num_blocks
        self._state.allocate(held, hit, self._allocate)
        held.is_registering = self._config.enable_prefix_caching
        self.total_query_tokens += held.num_tokens
        self.total_hit_tokens += held.num_computed_tokens
        self._counters.count_hit(hit)
        return True

    def grow(self, held: HeldKv, num_tokens: int) -> BlockTables | None:
        """Add blocks until `num_tokens` tokens fit. Returns them, or None if there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(held.block_tables[0])
        if missing <= 0:
            return self._nothing
        if missing * len(self._groups) > self.pool.num_free:
            return None
        added = tuple([tuple(self._allocate(missing)) for _ in self._groups])
        for table, block_ids in zip(held.block_tables, added, strict=True):
            table.extend(block_ids)
        return added

    def release_unseen(self, held: HeldKv) -> None:
        """Release the blocks that no later token of the request attends to."""
        for group in self._forgetful:
            group.release_unseen(held)

    def register(self, held: HeldKv) -> None:
        """Add the full blocks that the request has computed to the prefix cache."""
        num_full = held.num_computed_tokens // self.block_size
        first = held.num_registered_blocks
        if num_full <= first or not held.is_registering:
            return
        self._extend_hashes(held)
        run_start = first
        block_ids, hashes = held.block_tables[0], held.block_hashes
        for place in range(first, num_full):
            block_id = block_ids[place]
            if block_id == NO_BLOCK or not self._register(held, block_id, hashes[place]):
                self._note_stored(held, run_start, place)
                run_start = place + 1
        self._note_stored(held, run_start, num_full)
        for group, table in zip(self._groups[1:], held.block_tables[1:], strict=True):
            for place in range(first, num_full):
                if table[place] != NO_BLOCK:
                    self._register(held, table[place], group.name(hashes[place]))
        held.num_registered_blocks = num_full

    def find_external(
        self, held: HeldKv, max_num_tokens: int, *, continues_at: int | None = None
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and the external one together.

        `continues_at` is that of `find_prefix`.
        """
        if self._external is None or not self._config.enable_prefix_caching:
            return ExternalPrefix()
        self._external.begin_search()
        self._extend_hashes(held)
        hashes = held.block_hashes[: max_num_tokens // self.block_size]
        num_hits = self._search.find(hashes, continues_at).num_blocks
        return external_prefix(self._external_search.find(hashes, continues_at), hashes, num_hits)

    def find_promised(
        self, held: HeldKv, max_num_tokens: int, num_promised_tokens: int
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and a peer that has these leading tokens.

        With recurrent layers, the peer has a snapshot at their end, and no other.
        """
        if not self._config.enable_prefix_caching:
            return ExternalPrefix()
        if self._state.num_blocks and num_promised_tokens > max_num_tokens:
            return ExternalPrefix()
        self._extend_hashes(held)
        hashes = held.block_hashes[: max_num_tokens // self.block_size]
        num_hits = self._search.find(hashes, None).num_blocks
        promised = hashes[: num_promised_tokens // self.block_size]
        return external_prefix(self._promised_search.find(promised, None), hashes, num_hits)

    def allocate_loaded(self, count: int) -> list[BlockId]:
        """Allocate blocks to load into, which the caller has checked to be free."""
        return self._allocate(count)

    def register_loaded(
        self,
        held: HeldKv,
        prefix: ExternalPrefix,
        block_ids: Sequence[BlockId],
        are_loaded: Sequence[bool],
    ) -> None:
        """Add the loaded blocks of a request's prefix to the prefix cache."""
        parts: list[BlockId] = []
        loaded = zip(prefix.names, prefix.groups, prefix.places, block_ids, are_loaded, strict=True)
        for name, group, place, block_id, is_loaded in loaded:
            if not is_loaded:
                continue
            if group == SNAPSHOT:
                parts.append(block_id)
                if len(parts) == self._state.num_blocks:
                    self._register_snapshot(held, place + 1, tuple(parts))
            elif self._register(held, block_id, BlockHash(name)) and not group:
                self._note_stored(held, place, place + 1)

    def register_received(self, held: HeldKv, first: int, block_ids: Sequence[BlockId]) -> None:
        """Add the first blocks of a transfer that is over to the prefix cache, from this place on.

        The request may have ended. With recurrent layers, no prefix ends there without the state.
        """
        if not held.is_registering or self._state.num_blocks:
            return
        end = first + self.transfer_order.num_whole_places(len(block_ids))
        slots = itertools.product(held.block_hashes[first:end], range(len(self._groups)))
        for place, ((name, group), block_id) in enumerate(zip(slots, block_ids, strict=False)):
            is_new = self._register(held, block_id, name_in_group(name, group))
            if is_new and not group:
                place_of_block = first + place // len(self._groups)
                self._note_stored(held, place_of_block, place_of_block + 1)

    def register_named(
        self,
        names: Sequence[BlockName],
        block_ids: Sequence[BlockId],
        are_loaded: Sequence[bool],
    ) -> None:
        """Add loaded blocks to the prefix cache whose tokens are not known here.

        No event names them: the external cache that held them does, and it need not store them.
        """
        parts: dict[BlockHash, dict[BlockHash, BlockId]] = {}  # by the end of the snapshot
        for name, block_id, is_loaded in zip(names, block_ids, are_loaded, strict=True):
            if not is_loaded:
                continue
            end = snapshot_end(BlockHash(name))
            if end is None:
                self.pool.register(block_id, BlockHash(name))
            else:
                parts.setdefault(end, {})[BlockHash(name)] = block_id
        for end, found in parts.items():
            if len(found) == self._state.num_blocks:
                self._state.snapshots.register(end, tuple(found[name] for name in sorted(found)))

    def take_unstored(self) -> tuple[BlockHash, BlockId, BlockHints] | None:
        """Return the next block that was registered, if any. It may have been evicted since."""
        return self._unstored.popleft() if self._unstored else None

    def store_hits(self, held: HeldKv, num_hits: int) -> None:
        """Queue the prefix hits of a request to be stored outside, where they may be missing."""
        for group, table in enumerate(held.block_tables):
            for place, block_id in enumerate(table[:num_hits]):
                if block_id != NO_BLOCK:
                    name = name_in_group(held.block_hashes[place], group)
                    self._unstored.append((name, block_id, held.block_hints))

    def forget_unstored(self) -> None:
        self._unstored.clear()

    @property
    def has_unstored(self) -> bool:
        return bool(self._unstored)

    def names_of(self, held: HeldKv, num_blocks: int | None = None) -> list[BlockHash]:
        """Return the names of the first full blocks of a request, or of all of them.

        They include those of every group, and of snapshots.
        """
        names = []
        for block_hash in held.block_hashes[:num_blocks]:
            names += [group.name(block_hash) for group in self._groups]
            names += self._state.names(block_hash)
        return names

    def keep(self, hit: PrefixHit) -> None:
        """Make the blocks of a hit those that were used most recently."""
        self.pool.hold(hit.block_ids)
        self.pool.release(hit.block_ids)

    def end_chunk(self, held: HeldKv) -> None:
        """Make the state that a prefill chunk computed the current one."""
        self._state.end_chunk(held)

    def start_decode(self, held: HeldKv, max_num_slots: int) -> None:
        """Note that the next pass computes one token of the request, and so do those after it."""
        self._calendar.start_decode(held, max_num_slots)

    def plan_pass(
        self, chunks: Iterable[tuple[HeldKv, int]]
    ) -> dict[RequestId, tuple[StateSnapshot, ...]] | None:
        """Return the snapshots that the coming pass takes, given its prefill chunks."""
        return self._calendar.plan(chunks)

    def end_pass(self) -> None:
        """Cache what the pass computed besides the blocks of requests: snapshots."""
        self._calendar.apply()

    def allocate_snapshot(self, held: HeldKv, num_tokens: int) -> StateSnapshot | None:
        """Allocate the blocks of a snapshot after these tokens of the request.

        Returns None if it would not be cached, is cached already, or there are too few blocks.
        """
        if not held.is_registering or self.pool.num_free < self._state.num_blocks:
            return None
        self._extend_hashes(held)
        if self._end_hash(held, num_tokens) in self._state.snapshots:
            return None
        return StateSnapshot(num_tokens, tuple(self._allocate(self._state.num_blocks)))

    def register_snapshot(self, held: HeldKv, snapshot: StateSnapshot) -> None:
        """Add a snapshot to the prefix cache."""
        if held.is_registering:
            num_blocks = snapshot.num_tokens // self.block_size
            self._register_snapshot(held, num_blocks, snapshot.block_ids)

    def release(self, held: HeldKv, *, is_over: bool = True) -> None:
        """Release all blocks of a request. Full ones stay in the prefix cache until evicted.

        Unless it `is_over`, it needs them again, whatever its hints say about its end.
        """
        self.register(held)
        first, *others = held.block_tables or ((),)
        tables = [self._state.release(held, first)]
        tables += [[each for each in table if each != NO_BLOCK] for table in others]
        is_released = is_over and held.block_hints.is_released
        mark = self.pool.evict_first if is_released else self.pool.evict_in_turn
        for block_ids in tables:
            mark(block_ids)
            self.pool.release(block_ids)
        held.block_tables = ()
        held.num_computed_tokens = 0
        held.num_registered_blocks = 0

    def uncache_blocks(self, held: HeldKv) -> None:
        """Remove a request's blocks, including its prefix hits, from the prefix cache.

        Called when the KV of the request may be wrong. Snapshots of its state are removed as well.
        """
        held.is_registering = False
        self.pool.unregister(held.block_ids)
        self._state.uncache(held)
        self._note_removed()

    def reset(self, holders: Iterable[HeldKv]) -> int:
        """Drop every cached prefix and return the number of blocks they had.

        KV that `holders` compute based on old KV is never cached.
        """
        num_cached = self.pool.num_cached
        self.pool.forget_hashes()
        self._state.snapshots.clear()
        for held in holders:
            held.is_registering = False
        if self._config.collect_events:
            self._events.append(AllBlocksCleared())
        return num_cached

    def take_events(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def stats_by_group(self, requests: Collection[HeldKv]) -> dict[str, GroupStats]:
        """Return the statistics of each KV group, and of recurrent states."""
        num_held = [sum(map(memory.num_held, requests)) for memory in self._memories]
        return self._counters.stats(num_held)

    def check(self, held: Iterable[BlockId], requests: Iterable[HeldKv] = ()) -> None:
        """Raise BlocksUnaccounted unless `held`, one entry per reference, matches the pool.

        Also checks the block tables of the requests, group by group.
        """
        self.pool.check([*held, *self._calendar.held_blocks()])
        self._state.snapshots.check()
        for each in requests:
            lengths = {len(table) for table in each.block_tables}
            if len(lengths) > 1:
                raise BlocksUnaccounted(f"{each.request_id}: tables of {sorted(lengths)} blocks")
            for memory in self._memories:
                memory.check(each)

    def _search_with(self, outside: Holder) -> PrefixSearch:
        """Return a search for prefixes in the prefix cache and another cache together."""
        both = PoolAndExternal(self.pool, outside)
        has_state = self._state.num_blocks > 0
        snapshots = SnapshotsAndExternal(self._state.snapshots, outside) if has_state else None
        return PrefixSearch(both, self._specs, self.block_size, snapshots)

    def _register(self, held: HeldKv, block_id: BlockId, name: BlockHash) -> bool:
        is_new = self.pool.register(block_id, name)
        hints = held.block_hints
        if is_new and self._external is not None and not hints.is_released:
            self._unstored.append((name, block_id, hints))
        return is_new

    def _register_snapshot(self, held: HeldKv, num_blocks: int, block_ids: BlockIds) -> None:
        block_hash = held.block_hashes[num_blocks - 1]
        if not self._state.snapshots.register(block_hash, block_ids):
            return
        self._add_stored(held, num_blocks - 1, num_blocks)
        hints = held.block_hints
        if self._external is not None and not hints.is_released:
            names = self._state.names(block_hash)
            self._unstored.extend((*each, hints) for each in zip(names, block_ids, strict=True))

    def _end_hash(self, held: HeldKv, num_tokens: int) -> BlockHash:
        """Return the hash of the block that ends with these tokens."""
        return held.block_hashes[num_tokens // self.block_size - 1]

    def _extend_hashes(self, held: HeldKv) -> None:
        extend_hashes(held.block_hashes, held.root_hash, held.token_ids, self.block_size)

    def _position(self, hit: PrefixHit, continues_at: int | None) -> int:
        """Return the position of the next token that is computed here."""
        return hit.num_blocks * self.block_size if continues_at is None else continues_at

    def _allocate(self, count: int) -> list[BlockId]:
        """Allocate `count` blocks, which the caller has checked to be free."""
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise RuntimeError(f"{count} blocks are needed, {self.pool.num_free} are free")
        self._note_removed()
        return blocks

    def _note_removed(self) -> None:
        evicted = self.pool.take_evicted()
        self._counters.count_evicted(evicted)
        if self._state.num_blocks:
            removed = self._state.snapshots.drop_evicted(evicted)
        else:
            removed = tuple(name for name in evicted if is_of_first_group(name))
        if removed and self._config.collect_events:
            self._events.append(BlockRemoved(removed))

    def _note_stored(self, held: HeldKv, start: int, end: int) -> None:
        # With recurrent layers, the blocks before a snapshot are no hit without it.
        if not self._state.num_blocks:
            self._add_stored(held, start, end)

    def _add_stored(self, held: HeldKv, start: int, end: int) -> None:
        if start == end or not self._config.collect_events:
            return
        parent = held.block_hashes[start - 1] if start else None
        hashes = tuple(held.block_hashes[start:end])
        token_ids: tuple[int, ...] = ()
        if self._config.collect_token_ids:
            token_ids = tuple(held.token_ids[start * self.block_size : end * self.block_size])
        self._events.append(BlockStored(hashes, parent, token_ids, self.block_size, held.root_hash))
