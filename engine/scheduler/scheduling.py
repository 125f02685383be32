"""Scheduling, the first half of a step: assign tokens and KV blocks to requests.

There is no separate prefill or decode phase. A request needs steps until its
`num_computed_tokens` has caught up with its `num_tokens`. A step distributes a token budget:
first to decoding requests, then to requests whose KV landed, to prefills in progress and to
waiting requests.
"""

from __future__ import annotations

from baton.engine.errors import OutOfOrder
from baton.engine.plan import BlockTables, Plan
from baton.engine.scheduler.admission import AdmissionRules, Refusal
from baton.engine.scheduler.prompt_budget import PromptBudget
from baton.engine.scheduler.request import BY_RANK, Request, RequestStatus
from baton.engine.scheduler.state import SchedulerState
from baton.engine.scheduler.urgency import preempt_for


class StepPlanner:
    """Plans steps: changes the scheduler's state and returns a Plan for the runner."""

    def __init__(self, state: SchedulerState, *, has_state: bool) -> None:
        self._state = state
        self._config = state.config
        self._num_slots_per_decode = state.config.num_slots_per_decode
        self._has_state = has_state
        self.budget = PromptBudget(state.config)
        self._admission = AdmissionRules(state, self.budget)
        self.is_cut_short = False  # the last plan left requests for the next one to look up
        self._blocked_head: Request | None = None  # the head that the last step left waiting

    def plan(self) -> Plan:
        """Plan a step. The order decides who gets blocks and tokens when they are short."""
        self.is_cut_short = False
        # Before this step takes blocks: those that it evicts would be lost.
        self._state.arrivals.stores.store_new()
        self._preempt_for_head()
        num_preemptions = self._state.total_preemptions
        self._grow_running()
        # Ready before waiting: a request that holds blocks must not queue behind one that needs
        # blocks, or neither could proceed. Ready before the next chunk of a prefill, too, which
        # gets one token less: the client already has the first token of the ready request.
        is_ready_served = self._schedule_ready()
        # All that decode are in the batch now, and prompts get what they leave.
        self.budget.begin_step(self._state.batch.num_decoding)
        self._schedule_prefills()
        # Blocks of a preempted request are for the running ones. A new request would take them
        # and be preempted next.
        can_admit = is_ready_served and self._state.total_preemptions == num_preemptions
        if can_admit:
            self._schedule_waiting()
        self._spend_leftover(can_admit)
        return self._take_plan()

    def plan_ahead(self) -> Plan | None:
        """Plan the decodes after those of the pending plan, whose tokens are not known yet.

        Returns None, changing nothing, if the next step may do more than that.
        """
        self._state.stop_overdue_waits()
        decodes = self._state.batch.decodes_after(1) if self._can_plan_ahead() else {}
        if not decodes:
            return None
        self._state.arrivals.stores.store_new()
        for request in self._state.batch.begin_step():
            self._grow_ahead(request)
        return self._state.batch.take_plan(self._state.arrivals.orders.take(), decodes=decodes)

    def _can_plan_ahead(self) -> bool:
        state, batch = self._state, self._state.batch
        # A pass with draft tokens or recurrent states depends on the result of the one before it.
        if self._num_slots_per_decode > 1 or self._has_state:
            return False
        if batch.chunks or batch.prefilling or len(state.waiting) > state.waiting.num_followers:
            return False
        if len(state.ready) and len(batch) < self._config.max_num_seqs:
            return False
        num_blocks = batch.num_due_next() * state.cache.num_groups
        return num_blocks <= state.cache.pool.num_free

    def _grow_ahead(self, request: Request) -> None:
        """Allocate the block that a token after the pending one needs. It must be free."""
        cache = self._state.cache
        cache.register(request.kv)
        cache.release_unseen(request.kv)
        num_slots = min(request.kv.num_computed_tokens + 2, request.max_num_slots)
        added = cache.grow(request.kv, num_slots)
        if added is None:
            raise OutOfOrder(f"there are too few blocks for {request.request_id}")
        self._state.batch.grow(request, added, cache.capacity(request.kv), num_pending=1)

    def _preempt_for_head(self) -> None:
        """Preempt running requests for a more urgent head that the last step left waiting."""
        head, self._blocked_head = self._blocked_head, None
        if head is not None and head is self._state.waiting.head():
            preempt_for(self._state, head)

    def _take_plan(self) -> Plan:
        state, batch = self._state, self._state.batch
        if self._config.push_layers:
            self._send_layers()
        # Last of all, from the blocks that no request needs: copies of states are optional.
        chunks = [(request.kv, num_tokens) for request, num_tokens in batch.chunks]
        state_copies = state.cache.plan_pass(chunks)
        # Blocks that became full since the last step were registered in this one.
        state.arrivals.stores.store_new()
        return batch.take_plan(
            state.arrivals.orders.take(), self.budget.num_draft_tokens, state_copies
        )

    # --- running ------------------------------------------------------------------

    def _grow_running(self) -> None:
        # Only requests whose blocks are full come here. All others decode without any work, since
        # the batch keeps them.
        for request in self._state.batch.begin_step():
            self._grow_or_preempt(request)

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
            # Its prompt may fill its last block: the next token then needs another one.
            request = head[1]
            if not self._allocate_for_ready(request):
                return False
            state.ready.remove(request)
            request.move(RequestStatus.RUNNING)
            state.batch.start_decode(request, state.cache.capacity(request.kv))
            state.cache.start_decode(request.kv, request.max_num_slots)
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
        # By rank, not by start: a more urgent prompt that started later gets the tokens first.
        prefilling = self._state.batch.prefilling.values()
        for request in sorted(prefilling, key=BY_RANK):
            num_missing = request.num_tokens - request.kv.num_computed_tokens
            chunk = self.budget.next_chunk(request, num_missing)
            if chunk:
                self._state.batch.continue_prefill(request, chunk)
            # Without tokens, too: it still counts as an incomplete prefill.
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
                # Not another chunk: a pass runs one run of tokens per request.
                chunks[index] = (request, chunk + more)
                self.budget.extend(request, more, num_missing)
        return is_any_extended

    def _send_layers(self) -> None:
        """Order the layer-wise transfer of the blocks that this plan's chunks complete."""
        state = self._state
        for request, num_tokens in state.batch.chunks:
            num_computed = request.kv.num_computed_tokens + num_tokens
            is_complete = num_computed == request.num_tokens
            # A block that this chunk only begins is sent with the chunk that completes it.
            num_whole = num_computed // state.cache.block_size
            num_blocks = request.kv.num_blocks if is_complete else num_whole
            state.arrivals.sends.send(
                request.submitted.send_to, request.kv, num_blocks, by_layer=True
            )

    # --- waiting ------------------------------------------------------------------

    def _schedule_waiting(self) -> None:
        waiting = self._state.waiting
        self._state.stop_overdue_waits()
        while (head := waiting.head(allow_long=self.budget.allows_long)) is not None:
            if self.budget.are_look_ups_spent:
                self.is_cut_short = True
                return
            # A head that is started or set aside leaves the queue, and the next one is tried. One
            # that blocks keeps the others waiting: if they passed, it could starve.
            if self._admission.try_start(head) is Refusal.BLOCKS:
                self._blocked_head = head
                return
