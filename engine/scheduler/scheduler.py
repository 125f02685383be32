"""The scheduler: turns requests into plans, and results of plans into outputs.

Pure: it owns the requests and their block tables, and depends on no torch, clock, network or
thread. Each plan must be updated with its result before the next one is made, except by
`schedule_ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from baton.core.ids import HandoffId, RequestId
from baton.core.output import Failure, FailureCause, FinishReason, Output
from baton.core.pause_mode import PauseMode
from baton.core.request import EngineRequest
from baton.engine.errors import OutOfOrder
from baton.engine.events import GroupStats, KvEvent, SchedulerStats
from baton.engine.kv_arrival.arrivals import NO_SOURCES, KvSources
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.output_processing import OutputProcessor
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.running_batch import make_row
from baton.engine.scheduler.scheduling import StepPlanner
from baton.engine.scheduler.state import SchedulerState
from baton.engine.scheduler.validation import validate_request
from baton.engine.structured_output.grammar import Grammar
from baton.kv_transfer.external_kv import KV
from baton.kv_transfer.types import NO_REPORTS, KvOrders, KvReports

STATE_LOST = "a pass failed and its recurrent states were lost, with KV already sent: try again"


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        sources: KvSources = NO_SOURCES,
    ) -> None:
        self.config = config
        self.cache_config = cache_config
        self.adapters: set[str] = set()  # ids of those that requests can use
        self._state = SchedulerState(config, cache_config, sources)
        self._planner = StepPlanner(self._state)
        self._output_processor = OutputProcessor(self._state)
        self._began_s = 0.0  # the first of the pending steps

    # --- requests -----------------------------------------------------------------

    def validate(self, request: EngineRequest) -> None:
        """Raise InvalidRequest if it can never be served. Reads only settings: thread-safe."""
        validate_request(request, self.config, self.cache_config, self.adapters)
        if request.foreign_kv is not None:
            self._state.arrivals.foreign.check(request, request.foreign_kv)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest, changing nothing, if it can never be served."""
        self.validate(request)
        self.enqueue(request)

    def enqueue(self, request: EngineRequest) -> None:
        """Queue a request that was validated. Raises InvalidRequest if one of its ids is in use."""
        self._state.add(request)

    def add_grammar(self, submitted: EngineRequest, grammar: Grammar) -> None:
        """Queue the request, whose grammar is compiled. Does nothing if the request has ended."""
        request = self._find_alive(submitted)
        if request is not None:
            self._state.enqueue_compiled(request, grammar)

    def reject_grammar(self, submitted: EngineRequest, reason: str) -> None:
        """End the request, whose grammar was rejected. Does nothing if it has already ended."""
        request = self._find_alive(submitted)
        if request is not None:
            failure = Failure(reason, FailureCause.REQUEST)
            self._state.end(request, FinishReason.ERROR, failure)

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state. The final output is part of the next step's outputs.

        Blocks that a peer can still write or read stay allocated. Unknown ids are ignored, since
        the request may just have ended by itself.
        """
        request = self._state.requests.get(request_id)
        if request is not None:
            self._state.end(request, FinishReason.ABORT)

    def withdraw_completed(self, handoff_id: HandoffId, reason: str) -> None:
        """Withdraw a hand-off whose request has ended with its first token.

        Its blocks are released when the KV worker reports that it no longer uses them. Does
        nothing if the hand-off is over or its request is alive (abort that one instead).
        """
        self._state.arrivals.sends.withdraw_completed(handoff_id, reason)

    def abort_all(self) -> None:
        for request_id in self.request_ids():
            self.abort(request_id)

    def pause(self, mode: PauseMode) -> None:
        """Start no requests until `resume`. KV transfers go on, with their deadlines."""
        self._state.pause_mode = mode
        if mode is PauseMode.ABORT:
            self.abort_all()

    def resume(self) -> None:
        """Schedule again all requests that have not ended, in the order of before."""
        self._state.pause_mode = None

    @property
    def has_paused(self) -> bool:
        """True if nothing is computed any more, or the pause has ended."""
        return self._state.pause_mode is None or self._state.is_at_rest

    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the ids of the requests that have not ended."""
        return tuple(self._state.requests)

    def requests(self) -> list[EngineRequest]:
        """Return the requests that have not ended, as they were submitted."""
        return [request.submitted for request in self._state.requests.values()]

    def _find_alive(self, submitted: EngineRequest) -> Request | None:
        """Return this request, or None if it has ended, even if its id is in use again."""
        request = self._state.requests.get(submitted.request_id)
        return request if request is not None and request.submitted is submitted else None

    # --- the step -----------------------------------------------------------------

    def schedule(self, now: float) -> Plan:
        """Plan the next step. The plan is empty if all requests wait for KV or for blocks."""
        if self._state.batch.pending:
            raise OutOfOrder("the last plan was not updated with its result")
        self._state.now_s = self._began_s = now
        return self._planner.plan()

    def schedule_ahead(self, now: float) -> Plan | None:
        """Plan the step after the pending plan, whose tokens are not known yet.

        None: its result must come first. The runner must run the plans one after the other. If a
        request ends in the first one, its result in the second one is ignored, and its blocks are
        released with that result.
        """
        if len(self._state.batch.pending) != 1:
            raise OutOfOrder("no single plan awaits its result")
        self._state.now_s = now
        return self._planner.plan_ahead()

    def take_kv_orders(self) -> KvOrders:
        """Return the KV orders since the last plan, which need not wait for the next one."""
        return self._state.arrivals.orders.take()

    def update(
        self,
        plan: Plan,
        run: RunResult,
        kv: KvReports = NO_REPORTS,
        now: float | None = None,
    ) -> list[Output]:
        """Apply the result of a plan. Without `now`, the time is that of the plan."""
        pending = self._state.batch.pending
        if not pending or plan is not pending[0].plan:
            raise OutOfOrder("this plan is not the one that awaits its result")
        step = pending[0]
        if now is not None:
            self._planner.budget.pace.record_step(now - self._began_s, *step.load)
            self._state.now_s = now
        self._began_s = self._state.now_s
        # KV reports first: no order may follow for a hand-off that is reported as over.
        self._output_processor.settle_kv(kv)
        pending.popleft()
        self._output_processor.settle_run(step, run)
        if pending:
            self._planner.order_layers(pending[0].chunks)
        outputs, self._state.outbox = self._state.outbox, []
        return outputs

    def running_rows(self) -> dict[RequestId, PlanRow]:
        """Return the requests of the pending plan's batch, in the state before it is run."""
        running, pending = self._state.batch.running, self._state.batch.pending
        later = {row.request_id for step in list(pending)[1:] for row in step.plan.started}
        return {
            request_id: make_row(request)
            for request_id, request in running.items()
            if request_id not in later
        }

    def overwritten(self) -> tuple[RequestId, ...]:
        """Return the requests whose recurrent states are lost if the first pending pass has failed.

        Both pending passes must have been launched. The second one reads the side of a state that
        the first one wrote, and writes the side that the first one read.
        """
        batch = self._state.batch
        if not self.cache_config.layout.has_state or len(batch.pending) < 2:
            return ()
        first, second = batch.pending
        return tuple(
            request_id
            for request_id, request in batch.running.items()
            if first.num_tokens_of(request) and second.num_tokens_of(request)
        )

    def recompute(self, request_ids: Iterable[RequestId]) -> None:
        """Preempt these requests, whose states were lost with a pass.

        No pass may write their blocks any more. The results of pending plans are ignored.
        """
        state = self._state
        for request_id in request_ids:
            request = state.requests[request_id]
            for step in state.batch.pending:
                step.end(request)
            if state.arrivals.sends.has_sent(request.submitted.send_to):
                # The hand-off names blocks that another computation does not write.
                failure = Failure(STATE_LOST, FailureCause.KV_LOST)
                state.end(request, FinishReason.ERROR, failure)
            else:
                state.preempt(request)

    # --- queries ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if a step could do something now; not while all requests wait for KV or pause."""
        state = self._state
        has_other_work = state.batch.has_changes or state.arrivals.has_orders or state.outbox
        return bool(state.is_schedulable or has_other_work)

    @property
    def is_cut_short(self) -> bool:
        """True if the last plan left requests that the next one can look up at once."""
        return self._planner.is_cut_short

    def stats(self) -> SchedulerStats:
        return self._state.stats()

    def stats_by_group(self) -> dict[str, GroupStats]:
        """Return statistics by KV group, such as "0 full", and those of recurrent states.

        Takes time proportional to the blocks that requests hold.
        """
        return self._state.cache.stats_by_group(self._state.held_kv())

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """Return and clear the KV cache events; none unless `CacheConfig.collect_events` is set."""
        return self._state.cache.prefixes.take_events()

    def reset_prefix_cache(
        self, tiers: Collection[str] = (), *, reset_running: bool = False
    ) -> dict[str, int]:
        """Drop the cached prefixes of these tiers, or of all; return how many blocks each had.

        Without them, KV computed so far is never hit again. Running requests continue undisturbed,
        or with `reset_running` give up their blocks in the next step and are computed again. Only
        the blocks of hand-offs in flight stay then.
        """
        num_blocks: dict[str, int] = {}
        if not tiers or KV in tiers:
            self._state.arrivals.forget()
            holders = (*self._state.held_kv(), *self._state.arrivals.receives.receivers())
            num_blocks[KV] = self._state.cache.reset(holders)
            if self._state.media is not None:
                self._state.media.reset()
            self._state.must_preempt_all |= reset_running
        return num_blocks | dict(self._state.arrivals.stores.clear(tiers or None))

    def check(self) -> None:
        """Raise BlocksUnaccounted unless every block is accounted for exactly once."""
        self._state.check()
