"""Scheduling, the first half of a step: assign tokens and KV blocks to requests.

There is no separate prefill or decode phase. A request needs steps until its
`num_computed_tokens` has caught up with its `num_tokens`. A step distributes a token budget:
first to decoding requests, then to requests whose KV landed, to prefills in progress and to
waiting requests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from baton.engine.events import RequestEventKind
from baton.engine.kv_arrival.arrivals import FillWait
from baton.engine.kv_arrival.kv_source import PrefixNeed
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.plan import BlockTables, Plan
from baton.engine.scheduler.prompt_budget import PromptBudget
from baton.engine.scheduler.request import Request, RequestStatus
from baton.engine.scheduler.state import SchedulerState
from baton.engine.scheduler.urgency import preempt_for


class _Verdict(Enum):
    """Outcome of an attempt to schedule the head of the waiting queue."""

    SCHEDULED = "scheduled"
    SET_ASIDE = "set aside"  # a long prompt lets shorter ones pass
    BLOCKED = "blocked"  # it waits, and so do all requests behind it
    FOLLOWS = "follows"  # it waits for a fill, and not for its turn


class _AllocationFailure(NamedTuple):
    """The head of the waiting queue for which there were too few blocks, and the state then.

    The prefix lookup is skipped until blocks are released or the cached prefix gets longer.
    """

    request: Request
    num_releases: int
    num_changes: int
    missing_hash: BlockHash | None  # once it is cached, fewer blocks are needed


class StepPlanner:
    """Plans steps: changes the scheduler's state and returns a Plan for the runner."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._config = state.config
        self._num_slots_per_decode = state.config.num_slots_per_decode
        self.budget = PromptBudget(state.config)
        self.is_cut_short = False  # the last plan left requests for the next one to look up
        self._last_failure: _AllocationFailure | None = None
        self._blocked_head: Request | None = None  # the head that the last step left waiting

    def plan(self) -> Plan:
        batch = self._state.batch
        self.is_cut_short = False
        self._state.arrivals.stores.store_new()
        self._preempt_for_head()
        preemptions_before = self._state.total_preemptions
        for request in batch.begin_step():
            self._grow_or_preempt(request)
        # Ready before waiting: a request that holds blocks must not queue behind one that needs
        # blocks, or neither could proceed. Ready before the next chunk of a prefill, too, which
        # gets one token less: the client already has the first token of the ready request.
        is_ready_served = self._schedule_ready()
        self.budget.begin_step(batch.num_decoding)
        self._schedule_prefills()
        self._state.waiting.requeue_cached(self._state.cache.pool.take_registered())
        # Blocks of a preempted request are for the running ones. A new request would take them
        # and be preempted next.
        can_admit = is_ready_served and self._state.total_preemptions == preemptions_before
        if can_admit:
            self._schedule_waiting()
        self._spend_leftover(can_admit)
        if self._config.push_layers:
            self._send_layers()
        snapshots = self._state.cache.plan_pass(
            (each.kv, num_tokens) for each, num_tokens in batch.chunks
        )
        self._state.arrivals.stores.store_new()
        return batch.take_plan(
            self._state.arrivals.orders.take(), self.budget.num_draft_tokens, snapshots
        )

    def record_step(self, seconds: float) -> None:
        """Record the duration of the last planned step."""
        self.budget.record_step(seconds)

    def _preempt_for_head(self) -> None:
        """Preempt running requests for a more urgent head that the last step left waiting."""
        head, self._blocked_head = self._blocked_head, None
        if head is not None and head is self._state.waiting.head():
            preempt_for(self._state, head, _max_num_hit_tokens(head))

    # --- running ------------------------------------------------------------------

    def _grow_or_preempt(self, request: Request) -> None:
        """Allocate blocks for this step's tokens; preempts the lowest-ranked requests if needed."""
        if request.status is not RequestStatus.RUNNING:
            return  # preempted for one before it
        cache = self._state.cache
        cache.register(request.kv)
        cache.release_unseen(request.kv)
        while request.status is RequestStatus.RUNNING:
            added = self._grow_to_decode(request)
            if added is not None:
                self._state.batch.grow(request, added, cache.capacity(request.kv))
                return
            self._state.preempt(self._state.lowest_ranked())

    def _grow_to_decode(self, request: Request) -> BlockTables | None:
        """Allocate blocks for one more step. Returns None if there are too few for one token.

        With speculation, slots for draft tokens are allocated only from free blocks, without
        preemption. The number of slots is clipped to the length of the request's block table.
        """
        num_slots = request.kv.num_computed_tokens + self._num_slots_per_decode
        if num_slots > request.max_num_slots:
            num_slots = request.max_num_slots
        added = self._state.cache.grow(request.kv, num_slots)
        if added is None and self._num_slots_per_decode > 1:
            added = self._state.cache.grow(request.kv, request.kv.num_computed_tokens + 1)
        return added

    # --- ready --------------------------------------------------------------------

    def _schedule_ready(self) -> bool:
        """Move ready requests into the batch. Returns False if blocks ran out.

        A full batch is no reason for False. The token budget always suffices, since it is at
        least `max_num_seqs`.
        """
        state = self._state
        while (head := state.ready.peek()) is not None:
            if len(state.batch) >= self._config.max_num_seqs:
                return True
            request = head[1]
            if not self._allocate_for_ready(request):
                return False
            state.ready.remove(request)
            request.move(RequestStatus.RUNNING)
            state.batch.start_decode(request, state.cache.capacity(request.kv))
            state.cache.start_decode(request.kv, request.max_num_slots)
            state.record_event(request, RequestEventKind.SCHEDULED)
        return True

    def _allocate_for_ready(self, request: Request) -> bool:
        """Allocate blocks for the next token of a ready request.

        If there are too few, it waits for running requests to end. When none is running, the
        lowest-ranked ready request is preempted.
        """
        state = self._state
        while self._grow_to_decode(request) is None:
            if state.batch.running or len(state.ready) == 1:
                return False
            state.preempt(state.lowest_ranked())
        return True

    # --- prefills in progress ----------------------------------------------------

    def _schedule_prefills(self) -> None:
        prefilling = self._state.batch.prefilling.values()
        for request in sorted(prefilling, key=lambda request: request.rank):
            num_missing = request.num_tokens - request.kv.num_computed_tokens
            chunk = self.budget.next_chunk(request, num_missing)
            if chunk:
                self._state.batch.continue_prefill(request, chunk)
            self.budget.give(request, chunk, num_missing)

    def _spend_leftover(self, can_admit: bool) -> None:
        """Give the leftover budget to the prefills that the long-prefill threshold limited.

        If that completes one of them, the next long prompt can be scheduled.
        """
        if not self.budget.releases_leftover():
            return
        while self._extend_chunks():
            if can_admit:
                self._schedule_waiting()

    def _extend_chunks(self) -> bool:
        """Extend chunks up to the budget. Returns False if none has prompt tokens left."""
        is_any_extended = False
        chunks = self._state.batch.chunks
        for index, (request, chunk) in enumerate(chunks):
            num_missing = request.num_tokens - request.kv.num_computed_tokens - chunk
            more = self.budget.extension(request, num_missing)
            if more:
                is_any_extended = True
                chunks[index] = (request, chunk + more)
                self.budget.extend(request, more, num_missing)
        return is_any_extended

    def _send_layers(self) -> None:
        """Order the layer-wise transfer of the blocks that this plan's chunks complete."""
        state = self._state
        for request, num_tokens in state.batch.chunks:
            num_computed = request.kv.num_computed_tokens + num_tokens
            is_complete = num_computed == request.num_tokens
            num_whole = num_computed // state.cache.block_size
            num_blocks = request.kv.num_blocks if is_complete else num_whole
            state.arrivals.sends.send_layers(request.spec.send_to, request.kv, num_blocks)

    # --- waiting ------------------------------------------------------------------

    def _schedule_waiting(self) -> None:
        waiting = self._state.waiting
        self._state.stop_overdue_waits()
        while (head := waiting.head(allow_long=self.budget.allows_long)) is not None:
            if self.budget.are_look_ups_spent:
                self.is_cut_short = True
                return
            verdict = self._try_schedule(head)
            if verdict is _Verdict.FOLLOWS or head.spec.kv_hints.prefetch:
                self.budget.note_look_up(head)
            if verdict is _Verdict.BLOCKED:
                self._blocked_head = head
                return
            if verdict is _Verdict.SET_ASIDE:
                waiting.set_aside(head, until=self._hash_for_short(head))

    def _try_schedule(self, request: Request) -> _Verdict:
        if self._would_fail_again(request):
            return _Verdict.BLOCKED
        if request.spec.kv_hints.prefetch:
            return self._prefetch(request)
        if request.arrival.handoff is not None:
            return self._grant_to_peer(request)
        return self._admit(request)

    def _prefetch(self, request: Request) -> _Verdict:
        """Load the prefix of a request that gets no token. Ends the request once it is loaded."""
        max_num_hits = _max_num_hit_tokens(request)
        if self._try_wait(request, max_num_hits):
            return _Verdict.FOLLOWS
        hit = self._state.cache.find_prefix(request.kv, max_num_hits)
        self._state.end_prefetch(request, hit)
        return _Verdict.SCHEDULED

    def _admit(self, request: Request) -> _Verdict:
        """Move a request into the batch, with all its blocks and a first chunk of tokens."""
        state = self._state
        # At least one token is computed here: the next one is sampled from its logits.
        max_num_hits = _max_num_hit_tokens(request)
        if self._try_wait(request, max_num_hits):
            return _Verdict.FOLLOWS
        if len(state.batch) >= self._config.max_num_seqs or self.budget.is_spent:
            return _Verdict.BLOCKED
        hit = state.cache.find_prefix(request.kv, max_num_hits)
        is_shorter = request.arrival.may_look_again(hit.num_blocks)
        if is_shorter and self._try_wait(request, max_num_hits):
            return _Verdict.FOLLOWS
        num_missing = request.num_tokens - hit.num_blocks * state.cache.block_size
        request.is_long = self.budget.is_long(num_missing)
        if request.is_long and not self.budget.allows_long:
            return _Verdict.SET_ASIDE
        chunk = self.budget.first_chunk(request, num_missing)
        if not chunk:
            return _Verdict.BLOCKED
        if not state.cache.admit(request.kv, hit):
            return self._record_failure(request, hit.num_blocks, max_num_hits)
        request.note_admission()
        state.waiting.remove(request)
        request.move(RequestStatus.RUNNING)
        state.batch.start_prefill(request, chunk)
        state.record_event(request, RequestEventKind.SCHEDULED)
        state.arrivals.sends.send(request.spec.send_to, request.kv, hit.num_blocks)
        self.budget.give(request, chunk, num_missing)
        self.budget.note_start(request)
        return _Verdict.SCHEDULED

    def _grant_to_peer(self, request: Request) -> _Verdict:
        """Grant the missing blocks to the peer. Needs neither budget nor a place in the batch."""
        state = self._state
        num_in_progress = state.num_waiting_for_remote_kvs + len(state.ready)
        if num_in_progress >= self._config.max_num_seqs:
            return _Verdict.BLOCKED
        num_tokens = request.num_tokens
        hit = state.cache.find_prefix(request.kv, num_tokens, continues_at=num_tokens)
        spare = state.num_spare_blocks
        wait = state.arrivals.find_fill_before_grant(
            request.arrival, hit.num_blocks, spare, state.now_s
        )
        if self._follow(request, wait):
            return _Verdict.FOLLOWS
        if not state.cache.admit(request.kv, hit, spare=spare, continues_at=num_tokens):
            return self._record_failure(request, hit.num_blocks, num_tokens)
        request.note_admission()
        state.waiting.remove(request)
        request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
        state.num_waiting_for_remote_kvs += 1
        state.arrivals.receives.grant(request.arrival, hit.num_blocks, state.now_s)
        state.record_event(request, RequestEventKind.GRANTED)
        return _Verdict.SCHEDULED

    def _try_wait(self, request: Request, max_num_hits: int) -> bool:
        """Let a request wait, without blocks, for a fill that gets more of its prefix.

        Fills begin for all requests that reach the head, also while the batch is full.
        """
        state = self._state
        spare = state.num_spare_blocks
        need = PrefixNeed(max_num_hits, self.budget.token_s, state.now_s, spare)
        return self._follow(request, state.arrivals.find_fill(request.arrival, need))

    def _follow(self, request: Request, wait: FillWait | None) -> bool:
        if wait is None:
            return False
        self._state.waiting.follow(request, wait.fill_id, wait.until_s)
        return True

    def _record_failure(self, request: Request, num_hits: int, max_num_tokens: int) -> _Verdict:
        cache = self._state.cache
        missing_hash = cache.missing_hash(request.kv, num_hits, max_num_tokens)
        self._last_failure = _AllocationFailure(
            request, cache.pool.num_releases, self._state.num_changes, missing_hash
        )
        return _Verdict.BLOCKED

    def _would_fail_again(self, request: Request) -> bool:
        failure, pool = self._last_failure, self._state.cache.pool
        if failure is None or failure.request is not request:
            return False
        if (failure.num_releases, failure.num_changes) != (
            pool.num_releases,
            self._state.num_changes,
        ):
            return False
        return failure.missing_hash is None or not pool.is_cached(failure.missing_hash)

    def _hash_for_short(self, request: Request) -> BlockHash | None:
        """Return the block that must be cached for this long prompt to count as short, or None.

        If that block is cached but an earlier one is missing, the missing one is returned.
        """
        cache, max_num_tokens = self._state.cache, _max_num_hit_tokens(request)
        num_blocks = cache.num_blocks_for(self.budget.min_cached_to_be_short(request.num_tokens))
        if num_blocks * cache.block_size > max_num_tokens:
            return None
        last = cache.missing_hash(request.kv, num_blocks - 1, max_num_tokens)
        if last is None or not cache.pool.is_cached(last):
            return last
        num_hits = cache.find_prefix(request.kv, max_num_tokens).num_blocks
        return cache.missing_hash(request.kv, num_hits, max_num_tokens)


def _max_num_hit_tokens(request: Request) -> int:
    """Return the number of leading tokens that can be taken from the prefix cache."""
    wants_prompt_logprobs = request.spec.sampling.prompt_logprobs is not None
    if wants_prompt_logprobs and request.num_prompt_logprobs < request.num_prompt_tokens:
        return 0  # logprobs exist only for computed tokens
    return request.num_tokens - 1
