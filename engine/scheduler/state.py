"""State shared by both halves of a step: live requests, queues, batch, KV cache and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.core.errors import InvalidRequest
from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.output import Failure, FinishReason, Output
from baton.core.pause_mode import PauseMode
from baton.core.request import EngineRequest
from baton.engine.errors import BlocksUnaccounted
from baton.engine.events import SchedulerStats
from baton.engine.kv_arrival.arrivals import KvArrivals, KvSources
from baton.engine.kv_arrival.fills import FillId
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.cache_group import PrefixHit
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.request_media import RequestMedia
from baton.engine.scheduler.batch_adapters import BatchAdapters
from baton.engine.scheduler.client_shares import ClientShares
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.media import MEDIA_PLANS, MediaPlans
from baton.engine.scheduler.queues import RankedQueue, WaitingQueue
from baton.engine.scheduler.request import BlockShortage, Rank, Request, RequestStatus
from baton.engine.scheduler.running_batch import RunningBatch
from baton.engine.scheduler.validation import max_num_tokens
from baton.engine.structured_output.after_reasoning import AfterReasoning
from baton.engine.structured_output.grammar import Grammar


class SchedulerState:
    """The scheduler's state, with the state transitions that touch several of its parts."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        sources: KvSources,
    ) -> None:
        self.config = config
        self.cache = KvCache(cache_config, is_stored=sources.external is not None)
        self.arrivals = KvArrivals(self.cache, sources, config.max_fill_wait_s)
        # Blocks that a grant to a peer leaves free for each request that holds blocks.
        self.num_headroom_blocks = config.remote_headroom_blocks * len(cache_config.layout.groups)
        self.requests: dict[RequestId, Request] = {}
        self.clients = ClientShares(cache_config.num_blocks, self.cache.num_groups)
        self.waiting = WaitingQueue(self.clients.num_held)
        self.ready = RankedQueue()
        self.batch = RunningBatch(config.num_slots_per_decode)
        self.adapters = BatchAdapters(config.max_loras)
        self.media: MediaPlans | None = None  # None: the model takes no pictures
        if config.num_encoder_rows:
            [make_plans] = MEDIA_PLANS
            self.media = make_plans(config, self.cache, self.arrivals.holds)
        self.num_waiting_for_remote_kvs = 0
        self.num_waiting_for_fsm = 0
        self.total_preemptions = 0
        self.total_sampled_tokens = 0
        self.total_proposed_tokens = 0
        self.total_accepted_tokens = 0
        self.proposed_by_position: list[int] = []
        self.accepted_by_position: list[int] = []
        self.num_changes = 0  # changes invalidate a remembered allocation failure
        self.now_s = 0.0
        self.pause_mode: PauseMode | None = None
        self.must_preempt_all = False  # before the next plan
        self._num_added = 0
        self.outbox: list[Output] = []  # of the step in progress

    # --- state transitions of a request -------------------------------------------

    def add(self, submitted: EngineRequest) -> None:
        self._check_ids(submitted)
        sampling = submitted.sampling
        eos_token_ids = frozenset() if sampling.ignore_eos else self.config.eos_token_ids
        limit = max_num_tokens(submitted, self.config)
        num_context = len(submitted.prompt_token_ids) + len(submitted.prior_output_token_ids)
        request = Request(
            submitted,
            self._rank(submitted),
            self.cache.naming.root(submitted.prefix_keys, len(submitted.prompt_token_ids)),
            eos_token_ids.union(sampling.stop_token_ids),
            # A sender ends with the first token, which the peer continues from.
            limit if submitted.send_to is None else min(limit, num_context + 1),
            takes_no_prefix=submitted.task.is_pooling
            and self.config.needs_all_tokens(submitted.task),
        )
        if submitted.media:
            request.media = RequestMedia.of(submitted, self.config.picture_rows)
        self.requests[submitted.request_id] = request
        self.clients.add(request)
        if submitted.receive_from is not None:
            self.arrivals.receives.expect(submitted.receive_from)
        if submitted.send_to is not None:
            request.lacks_grant = not self.arrivals.sends.open(
                submitted.send_to, submitted.request_id
            )
        if request.status is RequestStatus.WAITING_FOR_FSM:
            self.num_waiting_for_fsm += 1
        else:
            self.waiting.push(request)

    def enqueue_compiled(self, request: Request, grammar: Grammar) -> None:
        """Queue a request whose grammar is compiled. It keeps its place by arrival."""
        self._dequeue(request)
        section = request.submitted.sampling.reasoning
        if section is not None:
            grammar = AfterReasoning(grammar, section, self.config.eos_token_ids)
        request.grammar = grammar
        request.move(RequestStatus.WAITING)
        self.waiting.push(request)

    def preempt(self, request: Request) -> None:
        """Release the blocks of a request and queue it in front of requests that never ran."""
        request.arrival.counts_tokens = False
        request.num_preemptions += 1
        self.total_preemptions += 1
        self._start_over(request, RequestStatus.PREEMPTED)

    def restart(self, request: Request) -> None:
        """Queue a request whose KV was lost. It restarts without blocks: none are reused."""
        self._start_over(request, RequestStatus.WAITING)

    def make_ready(self, request: Request) -> None:
        """Queue a request whose KV has landed for a place in the batch."""
        self._dequeue(request)
        request.move(RequestStatus.READY)
        self.ready.push(request.rank, request)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        failure: Failure | None = None,
        vector: bytes = b"",
    ) -> None:
        """End a request in any state, without a last token."""
        self.outbox.append(
            Output(
                request.request_id,
                request.num_output_tokens,
                registration=request.registration,
                finish_reason=reason,
                failure=failure,
                served=request.served(),
                vector=vector,
            )
        )
        self.finish(request, reason.value if failure is None else failure.reason)

    def finish(self, request: Request, reason: str) -> None:
        """Release the blocks of a request that has its last output.

        Blocks that a hand-off references stay held, and so do those that a pass may still write.
        """
        # What a peer may still write or read stays held by its hand-off, until that is reported.
        self.end_receive(request, revokes=True)
        self.arrivals.sends.withdraw(request.submitted.send_to, reason)
        is_written = self._dequeue(request)
        if request.adapter_id:
            self._release_adapter(request)
        if request.media is not None and self.media is not None:
            self.media.release(request.request_id)
        if request.arrival.foreign_kv is not None:
            self.arrivals.foreign.let_go(request.arrival)
        request.arrival.is_over = True  # others no longer wait behind it for room to load
        self.arrivals.stores.note_end(request.kv, request.num_cached_tokens)
        if is_written:
            self.cache.register(request.kv)
        else:
            self.cache.release(request.kv)
        self._end_share(request)
        request.move(RequestStatus.FINISHED)
        del self.requests[request.request_id]

    def note_grant(self, handoff_id: HandoffId) -> None:
        """Let a request go first for whose KV a decode node has granted blocks."""
        request_id = self.arrivals.sends.note_grant(handoff_id)
        request = None if request_id is None else self.requests.get(request_id)
        if request is not None and request.submitted.send_to == handoff_id:
            request.lacks_grant = False
            self.num_changes += 1
            self.waiting.note_grant(request)

    def end_handoff(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off, and let its client come earlier."""
        self.arrivals.sends.end(handoff_id)
        client = self.clients.end_handoff(handoff_id)
        if client is not None:
            self.num_changes += 1
            self.waiting.note_release(client)

    def end_receive(self, request: Request, *, revokes: bool = False) -> None:
        """Let a request receive no more, and queue those that wait for the same blocks."""
        fill = self.arrivals.receives.stop(request.arrival, revokes=revokes)
        if fill is not None:
            self.stop_waiting_for([fill.fill_id])

    def stop_waiting_for(self, fill_ids: Iterable[FillId]) -> None:
        """Queue the requests again that wait for these fills."""
        for fill_id in fill_ids:
            self.waiting.release_followers(fill_id)
            self.num_changes += 1

    def stop_overdue_waits(self) -> None:
        """Queue the requests again that have waited long enough, or for too slow a fill."""
        if self.waiting.release_overdue(self.now_s):
            self.num_changes += 1

    def preemptable(self) -> list[Request]:
        """Return the requests that can be preempted: those that run or are ready.

        Senders that have begun to send are excluded: their hand-offs would keep the blocks. They
        hold all blocks they need and end with their prefill.
        """
        holders: list[Request] = [*self.batch.running.values(), *self.ready]
        has_sent = self.arrivals.sends.has_sent
        return [each for each in holders if not has_sent(each.submitted.send_to)]

    def preempt_all(self) -> None:
        """Preempt all that can be, if that was ordered. No pass may be pending."""
        if self.must_preempt_all:
            self.must_preempt_all = False
            for request in self.preemptable():
                self.preempt(request)

    def preempt_one(self) -> None:
        """Preempt a request, so that others can grow. At least one must be preemptable."""
        self.preempt(self.clients.choose_victim(self.preemptable()))

    @property
    def is_halted(self) -> bool:
        """True if requests in progress must not be computed either."""
        return self.pause_mode is PauseMode.KEEP

    @property
    def is_schedulable(self) -> bool:
        """True if a step could compute something: not while all requests wait for KV or pause."""
        if self.must_preempt_all:
            return True
        if self.is_halted:
            return False
        num_waiting = len(self.waiting) - self.waiting.num_out
        can_start = self.pause_mode is None and num_waiting > 0
        return can_start or bool(self.batch.running or len(self.ready))

    @property
    def is_at_rest(self) -> bool:
        """True if a pause is complete: no pass is pending, and none follows."""
        if self.batch.pending or self.must_preempt_all:
            return False
        num_holders = len(self.batch) + len(self.ready) + self.num_waiting_for_remote_kvs
        return self.is_halted or num_holders == 0

    @property
    def can_receive(self) -> bool:
        """True if one more request can hold blocks until its KV has landed and it runs."""
        return self.num_waiting_for_remote_kvs + len(self.ready) < self.config.max_num_seqs

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that a grant to a peer leaves free.

        Requests that hold blocks must be able to grow, or they would deadlock. Without any, the
        whole cache can be granted.
        """
        num_holders = self.num_waiting_for_remote_kvs + len(self.ready) + len(self.batch)
        return num_holders * self.num_headroom_blocks

    def num_spare(self, request: Request) -> int:
        """Return the blocks that must be free after a waiting request has got its own."""
        if request.arrival.handoff is not None:
            return self.num_spare_blocks
        if not request.lacks_grant:
            return 0
        return self.clients.num_reserved(request.client, self.cache.pool.num_free)

    def shortage_of(self, request: Request, hit: PrefixHit, max_num_tokens: int) -> BlockShortage:
        """Return the shortage of a waiting request that found this prefix of so many tokens."""
        missing_hash = self.cache.missing_hash(request.kv, hit.num_blocks, max_num_tokens)
        return BlockShortage(self.cache.pool.num_releases, self.num_changes, missing_hash)

    def lasts(self, shortage: BlockShortage | None) -> bool:
        """Return whether a request would fare no better than at this shortage. Costs no lookup."""
        pool = self.cache.pool
        if shortage is None or shortage.num_changes != self.num_changes:
            return False
        if shortage.num_releases != pool.num_releases:
            return False
        return shortage.missing_hash is None or not pool.is_cached(shortage.missing_hash)

    def held_kv(self) -> list[HeldKv]:
        ended = [held for step in self.batch.pending for held in step.written]
        return [*(request.kv for request in self.requests.values()), *ended]

    # --- statistics -------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.batch),
            num_ready=len(self.ready),
            num_waiting=len(self.waiting),
            num_waiting_for_remote_kvs=self.num_waiting_for_remote_kvs,
            num_waiting_for_fsm=self.num_waiting_for_fsm,
            num_blocks=self.cache.pool.num_blocks,
            num_free_blocks=self.cache.pool.num_free,
            num_cached_free_blocks=self.cache.pool.num_cached_free,
            num_granted_blocks=self.arrivals.receives.num_blocks,
            num_pending_receives=len(self.arrivals.receives),
            num_pending_sends=len(self.arrivals.sends),
            total_preemptions=self.total_preemptions,
            total_prefix_query_tokens=self.cache.total_query_tokens,
            total_prefix_hit_tokens=self.cache.total_hit_tokens,
            total_sampled_tokens=self.total_sampled_tokens,
            total_proposed_tokens=self.total_proposed_tokens,
            total_accepted_tokens=self.total_accepted_tokens,
            proposed_by_position=tuple(self.proposed_by_position),
            accepted_by_position=tuple(self.accepted_by_position),
            total_pulled_blocks=self.arrivals.pulls.total_landed_blocks,
            total_failed_pull_blocks=self.arrivals.pulls.total_failed_blocks,
            total_loaded_tokens=dict(self.arrivals.loads.total_tokens),
            **({} if self.media is None else self.media.stats()),
        )

    def check(self) -> None:
        """Raise BlocksUnaccounted unless all blocks and requests are accounted for."""
        self.cache.check(self._held_blocks(), self.held_kv())
        if self.media is not None:
            self.media.check(self.batch.running.keys())
        places = [
            *((request, RequestStatus.RUNNING) for request in self.batch.running.values()),
            *((request, RequestStatus.READY) for request in self.ready),
        ]
        placed = len(places) + len(self.waiting)
        placed += self.num_waiting_for_remote_kvs + self.num_waiting_for_fsm
        if placed != len(self.requests):
            raise BlocksUnaccounted(
                f"{len(self.requests)} requests, but {placed} are queued or run"
            )
        if self.clients.num_requests != len(self.requests) + self.clients.num_handoffs:
            raise BlocksUnaccounted("the requests of the clients do not add up")
        for request, status in places:
            if request.status is not status:
                raise BlocksUnaccounted(f"{request.request_id} is {request.status}, not {status}")
        for request in self.waiting:
            if request.kv.block_ids:
                raise BlocksUnaccounted(f"{request.request_id} is waiting, but holds blocks")

    # --- helpers ------------------------------------------------------------------

    def _check_ids(self, submitted: EngineRequest) -> None:
        if submitted.request_id in self.requests:
            raise InvalidRequest(f"request id {submitted.request_id} is in use")
        receive, send_to = submitted.receive_from, submitted.send_to
        if receive is not None and self.arrivals.receives.is_known(receive.handoff_id):
            raise InvalidRequest(f"hand-off {receive.handoff_id} is in use: raise the attempt")
        if send_to is not None and self.arrivals.sends.is_known(send_to):
            raise InvalidRequest(f"hand-off {send_to} is in use: raise the attempt")

    def _rank(self, submitted: EngineRequest) -> Rank:
        self._num_added += 1
        priority = submitted.priority if self.config.policy is SchedulingPolicy.PRIORITY else 0
        return (priority, submitted.arrival_s - submitted.age_s, self._num_added)

    def _dequeue(self, request: Request) -> bool:
        """Remove a request from its place. Returns whether a pass may still write its blocks."""
        self.num_changes += 1
        match request.status:
            case RequestStatus.WAITING | RequestStatus.PREEMPTED:
                self.waiting.remove(request)
            case RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.num_waiting_for_remote_kvs -= 1
            case RequestStatus.WAITING_FOR_FSM:
                self.num_waiting_for_fsm -= 1
            case RequestStatus.READY:
                self.ready.remove(request)
            case RequestStatus.RUNNING:
                return self.batch.remove(request)
        return False

    def _start_over(self, request: Request, status: RequestStatus) -> None:
        """Release the blocks of a request and queue it again."""
        self._dequeue(request)
        if request.adapter_id:
            self._release_adapter(request)
        if request.media is not None and self.media is not None:
            self.media.release(request.request_id)
        self.cache.release(request.kv, is_over=False)
        self.clients.release(request)
        self.waiting.note_release(request.client)
        request.move(status)
        request.is_resumed = True
        request.arrival.restart()  # what was not worth it may be better than computing
        self.waiting.push(request)

    def use_media(self, request: Request, start: int, num_tokens: int, num_left: int) -> int:
        """Have the pictures of these tokens encoded, as far as there is room.

        Returns the tokens that can be computed, which are all for a prompt of text alone. At most
        `num_left` are left in the step.
        """
        if request.media is None or self.media is None:
            return num_tokens
        num_tokens = self.media.limit(request.media, start, num_tokens, num_left)
        self.media.use(request.kv, request.media, start, num_tokens)
        return num_tokens

    def _release_adapter(self, request: Request) -> None:
        """Give up the place of a request's adapter, and queue those that can have one now.

        The first in rank goes first. After it has ended, others no longer stand behind it.
        """
        self.adapters.release(request.submitted)
        num_free = self.adapters.num_free
        while (first := self.waiting.first_for_place()) is not None:
            num_free -= first.adapter_id not in self.adapters
            if num_free < 0:
                return
            self.waiting.release_adapter(first.adapter_id)

    def _end_share(self, request: Request) -> None:
        """Release the share of a request that ends. What is still being sent counts until then."""
        handoff_id = request.submitted.send_to
        num_sending = self.arrivals.sends.num_held(handoff_id)
        self.clients.release(request)
        if handoff_id is not None and num_sending:
            self.clients.hand_off(handoff_id, request.client, num_sending)
        else:
            self.clients.remove(request.client)
        self.waiting.note_release(request.client)

    def _held_blocks(self) -> Iterator[BlockId]:
        for held in self.held_kv():
            yield from held.block_ids
        yield from self.arrivals.holds.block_ids()
