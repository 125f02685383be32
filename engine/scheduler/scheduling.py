"""Scheduling, the first half of a step: assign tokens and KV blocks to requests.

There is no separate prefill or decode phase. A request needs steps until its
`num_computed_tokens` has caught up with its `num_tokens`. A step distributes a token budget:
first to decoding requests, then to requests whose KV landed, and then to prompts by priority:
to prefills in progress and to waiting requests (`PromptBudget`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.core.ids import RequestId
from baton.engine.kv_cache.cache_group import PassChunk
from baton.engine.plan import NO_MEDIA, BlockTables, Plan
from baton.engine.scheduler.admission import AdmissionRules, Refusal
from baton.engine.scheduler.prompt_budget import PromptBudget
from baton.engine.scheduler.request import BY_RANK, Request, RequestStatus
from baton.engine.scheduler.state import SchedulerState
from baton.engine.scheduler.urgency import victims_for, victims_over_share


class StepPlanner:
    """Plans steps: changes the scheduler's state and returns a Plan for the runner."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._config = state.config
        self._num_slots_per_decode = state.config.num_slots_per_decode
        self.budget = PromptBudget(state.config)
        self._admission = AdmissionRules(state, self.budget)
        self.is_cut_short = False  # the last plan left requests for the next one to look up
        # The head that the last step left waiting, and whether long prompts could start then.
        self._blocked_head: tuple[Request, bool] | None = None
        self._can_admit = False

    def plan(self) -> Plan:
        """Plan a step."""
        self._state.preempt_all()
        if self._state.is_halted:
            return self._plan_halted()
        self._assign()
        return self._take_plan(self._state.batch.decodes())

    def plan_ahead(self) -> Plan | None:
        """Plan the step after the pending one, whose tokens are not known yet.

        Returns None if that takes blocks from running requests, or if there is nothing to compute.
        """
        if not self._can_plan_ahead():
            return None
        self._assign()
        decodes = self._state.batch.decodes()
        # Otherwise, the next plan contains what has changed.
        return self._take_plan(decodes) if decodes or self._state.batch.chunks else None

    def _plan_halted(self) -> Plan:
        """Plan a step without tokens. Requests may have ended, and KV may have come or gone."""
        self.is_cut_short = False
        self._state.batch.chunks = {}
        self.budget.begin_step(0)
        self._state.stop_overdue_waits()
        return self._take_plan({})

    def order_layers(self, chunks: Iterable[tuple[Request, int]]) -> None:
        """Order the layer-wise transfer of the blocks that these chunks of the next pass complete.

        The pass before it, if there is one, must have ended.
        """
        state = self._state
        for request, num_tokens in chunks if self._config.push_layers else ():
            if request.status is not RequestStatus.RUNNING:
                continue  # it has ended since the pass was planned
            num_computed = request.kv.num_computed_tokens + num_tokens
            is_complete = num_computed == request.num_tokens
            # A block that this chunk only begins is sent with the chunk that completes it.
            num_whole = num_computed // state.cache.block_size
            num_blocks = request.kv.num_blocks if is_complete else num_whole
            state.arrivals.sends.send(
                request.submitted.send_to, request.kv, num_blocks, by_layer=True
            )

    def _assign(self) -> None:
        """Assign tokens and blocks. The order decides who gets them when they are short."""
        self.is_cut_short = False
        # Before this step takes blocks: those that it evicts would be lost.
        self._state.arrivals.stores.store_new()
        self._preempt_for_head()
        num_preemptions = self._state.total_preemptions
        # Only requests whose blocks are full come here. All others decode without any work, since
        # the batch keeps them.
        for request in self._state.batch.begin_step():
            self._grow_or_preempt(request)
        # Ready before waiting: a request that holds blocks must not queue behind one that needs
        # blocks, or neither could proceed. Ready before the next chunk of a prefill, too, which
        # gets one token less: the client already has the first token of the ready request.
        is_ready_served = self._schedule_ready()
        # All that decode are in the batch now, and prompts get what they leave.
        self.budget.begin_step(self._state.batch.num_decoding)
        if self._state.media is not None:
            self._state.media.begin_step()
        # Blocks of a preempted request are for the running ones. A new request would take them
        # and be preempted next.
        is_preempted = self._state.total_preemptions != num_preemptions
        is_paused = self._state.pause_mode is not None
        self._can_admit = is_ready_served and not is_preempted and not is_paused
        self._schedule_prompts()

    def _can_plan_ahead(self) -> bool:
        """Return whether the pending pass computes something, and the next one preempts none."""
        state, batch = self._state, self._state.batch
        if not batch.pending[0].plan.num_scheduled_tokens:
            return False
        if state.must_preempt_all or state.is_halted:
            return False
        # Before blocks are counted: those that are to be stored cannot be taken.
        state.arrivals.stores.store_new()
        if any(victims_for(state, request) for request in self._urgent()):
            return False
        head = self._left_waiting()
        if head is not None and victims_over_share(state, head):
            return False
        num_missing = sum(map(self._num_missing_places, batch.due_next()))
        return num_missing * state.cache.num_groups <= state.cache.pool.num_free

    def _num_missing_places(self, request: Request) -> int:
        """Return how many blocks the table of a decoding request lacks for its next step."""
        num_blocks = self._state.cache.num_blocks_for(self._num_slots(request))
        return max(0, num_blocks - request.kv.num_blocks)

    def _preempt_for_head(self) -> None:
        """Preempt for a request that is more urgent, or of another client, and was left waiting."""
        for request in self._urgent():
            for victim in victims_for(self._state, request):
                # Once only: two urgent streams of requests could keep it from ever ending.
                victim.was_preempted_for_priority = True
                self._state.preempt(victim)
        head = self._left_waiting()
        for victim in [] if head is None else victims_over_share(self._state, head):
            self._state.preempt(victim)
        self._blocked_head = None

    def _urgent(self) -> list[Request]:
        """Return the requests that may preempt others: the heads of what waits."""
        if self._state.pause_mode is not None:
            return []
        waiting, heads = self._state.waiting, []
        first = waiting.first_for_place()
        if first is not None:
            heads.append(first)
        head = self._left_waiting()
        return heads if head is None else [*heads, head]

    def _left_waiting(self) -> Request | None:
        """Return the head that the last step left waiting, if it is the head still."""
        if self._blocked_head is None or self._state.pause_mode is not None:
            return None
        head, allow_long = self._blocked_head
        return head if head is self._state.waiting.head(allow_long=allow_long) else None

    def _take_plan(self, decodes: dict[RequestId, int]) -> Plan:
        state, batch = self._state, self._state.batch
        if not batch.pending:
            self.order_layers(batch.chunks.items())
        chunks = [
            PassChunk(request.kv, batch.position(request), num_tokens)
            for request, num_tokens in batch.chunks.items()
        ]
        # Last of all, from the blocks that no request needs: copies of states are optional.
        state_copies = state.cache.plan_pass(None if state.is_halted else chunks)
        # Blocks that became full since the last step were registered in this one.
        state.arrivals.stores.store_new()
        budget, orders = self.budget, state.arrivals.orders.take()
        media = NO_MEDIA if state.media is None else state.media.take_orders()
        plan = batch.take_plan(
            decodes, budget.load, orders, budget.num_draft_tokens, state_copies, media
        )
        for chunk, request in zip(chunks, batch.chunks, strict=True):
            if chunk.end == request.num_tokens:
                request.is_long = False
                batch.turn_to_decode(request, state.cache.capacity(request.kv))
                state.cache.start_decode(request.kv, chunk.end, request.max_num_slots)
        return plan

    # --- running ------------------------------------------------------------------

    def _grow_or_preempt(self, request: Request) -> None:
        """Allocate blocks for this step's tokens; preempts the lowest-ranked requests if needed."""
        if request.status is not RequestStatus.RUNNING:
            return  # preempted for one before it
        cache = self._state.cache
        # Full blocks are named only now, when a new one begins: not in each of the steps between.
        cache.register(request.kv)
        cache.release_unseen(request.kv)
        while request.status is RequestStatus.RUNNING:
            added = self._grow_to_decode(request)
            if added is not None:
                self._state.batch.grow(request, added, cache.capacity(request.kv))
                return
            # Possibly itself, which ends the loop.
            self._state.preempt_one()

    def _grow_to_decode(self, request: Request) -> BlockTables | None:
        """Allocate blocks for one more step. Returns None if there are too few for one token.

        With speculation, slots for draft tokens are allocated only from free blocks, without
        preemption.
        """
        added = self._state.cache.grow(request.kv, self._num_slots(request))
        if added is None and self._num_slots_per_decode > 1:
            num_slots = request.kv.num_computed_tokens + 1
            added = self._state.cache.grow(request.kv, num_slots)
        return added

    def _num_slots(self, request: Request) -> int:
        """Return the KV slots of a request up to the next step, with all drafts.

        They are clipped to the length of its block table.
        """
        num_slots = self._state.batch.max_position(request) + self._num_slots_per_decode
        return min(num_slots, request.max_num_slots)

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
            # Its prompt may fill its last block: the next token then needs another one.
            request = head[1]
            if not self._allocate_for_ready(request):
                return False
            state.ready.remove(request)
            state.num_changes += 1  # a more urgent one can preempt it now
            request.move(RequestStatus.RUNNING)
            state.batch.start_decode(request, state.cache.capacity(request.kv))
            state.cache.start_decode(
                request.kv, request.kv.num_computed_tokens, request.max_num_slots
            )
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
            state.preempt_one()
        return True

    # --- prompts ------------------------------------------------------------------

    def _schedule_prompts(self) -> None:
        """Give tokens to prompts in the two rounds of `PromptBudget`.

        By priority first: a waiting prompt goes before a laxer one that is in progress.
        """
        if self._can_admit or self._state.pause_mode is not None:
            self._state.stop_overdue_waits()
        for request in sorted(self._state.batch.prefilling.values(), key=BY_RANK):
            self._schedule_waiting(before=request.rank[0])
            self._continue_prefill(request)
        self._schedule_waiting()
        if self.budget.begin_leftover():
            for request in self.budget.long_partial:
                self._continue_prefill(request)
            self._schedule_waiting()

    def _continue_prefill(self, request: Request) -> None:
        batch = self._state.batch
        num_given = batch.chunks.get(request, 0)
        num_missing = request.num_tokens - batch.position(request) - num_given
        chunk = self.budget.next_chunk(request, num_missing, num_given)
        if request.media is not None:
            start = batch.position(request) + num_given
            chunk = self._state.use_media(request, start, chunk, self.budget.num_left_in_step)
        batch.continue_prefill(request, chunk)
        # Without tokens, too: it still counts as an incomplete prefill.
        self.budget.give(request, chunk, num_missing)

    # --- waiting ------------------------------------------------------------------

    def _release_for_granted(self, head: Request) -> None:
        """Withdraw a hand-off without a grant if `head` has one, and nothing else gives it blocks.

        Otherwise both nodes could wait for each other: the decode node for the KV of `head`, and
        this one for grants of the hand-offs that fill its cache.
        """
        batch, arrivals = self._state.batch, self._state.arrivals
        is_granted = head.submitted.send_to is not None and not head.lacks_grant
        will_release = batch.running or batch.pending or arrivals.will_release_blocks
        if is_granted and not will_release:
            arrivals.sends.withdraw_ungranted(
                "the prefill node was full, and granted hand-offs needed its blocks"
            )

    def _schedule_waiting(self, before: float = math.inf) -> None:
        """Start waiting requests whose priority is before this one."""
        while self._can_admit:
            long = self._state.waiting.first_aside()
            allow_long = long is not None and self.budget.allows_long(long)
            head = self._state.waiting.head(allow_long=allow_long)
            if head is None or head.rank[0] >= before:
                return
            if self.budget.are_look_ups_spent:
                self.is_cut_short, self._can_admit = True, False
                return
            # A head that is started or set aside leaves the queue, and the next one is tried. One
            # that blocks keeps the others waiting: if they passed, it could starve.
            if self._admission.try_start(head) is Refusal.BLOCKS:
                self._blocked_head, self._can_admit = (head, allow_long), False
                self._release_for_granted(head)
