"""The scheduler: requests go in, plans come out, results go in, outputs come out.

Pure: it owns the requests and the block table of the KV cache, and knows no torch, clock,
wire or thread. Every plan must be updated with its result before the next is made.
"""

from __future__ import annotations

from engine.admission import check_request
from engine.batch import row_of
from engine.book import RequestBook
from engine.errors import OutOfTurn
from engine.events import KvEvent, RequestEvent, SchedulerStats
from engine.grammar import Grammar
from engine.lifecycle import Request
from engine.plan import Plan, Row, StepResult
from engine.planning import Planner
from engine.request import ClientId, FinishReason, Output, RequestId, RequestSpec, StepOutputs
from engine.scheduler_config import CacheConfig, SchedulerConfig
from engine.settling import Settler
from kv_transfer.types import HandoffId


class Scheduler:
    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.config = config
        self.cache_config = cache_config
        self._book = RequestBook(config, cache_config)
        self._planner = Planner(self._book)
        self._settler = Settler(self._book)
        self._plan: Plan | None = None  # made and not yet updated

    # --- requests -----------------------------------------------------------------

    def validate(self, spec: RequestSpec) -> None:
        """Raise InvalidRequest if it can never be served. Reads settings alone: any thread."""
        check_request(spec, self.config, self.cache_config)

    def add(self, spec: RequestSpec) -> None:
        """Raise InvalidRequest, and stay as it was, if it can never be served."""
        self.validate(spec)
        self._book.add(spec)

    def grammar_came(self, spec: RequestSpec, grammar: Grammar) -> None:
        """What it asked for is compiled: it stands in line. If it is gone, nothing happens."""
        request = self._awaiting_grammar(spec)
        if request is not None:
            self._book.stand_in_line(request, grammar)

    def grammar_refused(self, spec: RequestSpec, reason: str) -> None:
        """What it asked for cannot be had: it ends. If it is gone, nothing happens."""
        request = self._awaiting_grammar(spec)
        if request is not None:
            self._settler.refuse(request, reason)

    def abort(self, request_id: RequestId) -> None:
        """End a request wherever it stands; its client is told with the next outputs.

        Blocks that a peer may still write or read stay held. Unknown ids are left alone:
        the request may have ended by itself a moment ago.
        """
        request = self._book.requests.get(request_id)
        if request is None:
            return
        ended = Output(
            request_id,
            request.num_output_tokens,
            finish_reason=FinishReason.ABORT,
            served=request.served(),
        )
        self._book.put_out(request.client_id, ended)
        self._book.finish(request, FinishReason.ABORT)

    def give_up_sending(self, handoff_id: HandoffId, reason: str) -> None:
        """Take back a hand-off whose request has ended with its first token.

        Its blocks come free when the wire is done with them. Hand-offs that are over, and
        those of requests that still live (abort those), are left alone.
        """
        self._book.handoffs.give_up_sending(handoff_id, reason)

    def abort_client(self, client_id: ClientId) -> None:
        """End all requests of a client that is gone."""
        for request_id in self.request_ids_by_client().get(client_id, []):
            self.abort(request_id)

    def request_ids_by_client(self) -> dict[ClientId, list[RequestId]]:
        by_client: dict[ClientId, list[RequestId]] = {}
        for request in self._book.requests.values():
            by_client.setdefault(request.client_id, []).append(request.request_id)
        return by_client

    def _awaiting_grammar(self, spec: RequestSpec) -> Request | None:
        """None if it has ended; another one may have its id by now."""
        request = self._book.requests.get(spec.request_id)
        return request if request is not None and request.spec is spec else None

    # --- the step -----------------------------------------------------------------

    def schedule(self, now: float) -> Plan:
        """The next step. It may be empty, when all that live wait for KV or for blocks."""
        if self._plan is not None:
            raise OutOfTurn("the last plan was not updated with its result")
        self._book.now_s = now
        self._plan = self._planner.plan()
        return self._plan

    def update(self, plan: Plan, result: StepResult, now: float | None = None) -> StepOutputs:
        """Take in what came of a plan. Without `now`, events bear the time of the plan."""
        if plan is not self._plan:
            raise OutOfTurn("this plan is not the one that waits for its result")
        self._plan = None
        if now is not None:
            self._planner.took(now - self._book.now_s)
            self._book.now_s = now
        # The wire first: no order may be written for a hand-off that it reports as over.
        self._settler.settle_kv(result.kv)
        self._settler.settle_run(result.run)
        return StepOutputs(self._book.take_outputs())

    def running_rows(self) -> dict[RequestId, Row]:
        """The running requests, as the runner must know them before the plan that waits is run."""
        running = self._book.batch.running
        return {request_id: row_of(request) for request_id, request in running.items()}

    # --- what others ask ----------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now; False while all that live wait for KV."""
        book = self._book
        num_in_line = len(book.waiting) - book.waiting.num_followers
        has_requests = book.batch.running or len(book.ready) or num_in_line
        has_news = book.batch.has_changes or book.handoffs.has_orders or book.has_outputs
        return bool(has_requests or has_news)

    @property
    def is_idle(self) -> bool:
        """Nothing lives here and nothing is owed to anyone: every block is free."""
        return not (self.has_work or self.awaits_kv or self._book.requests)

    @property
    def awaits_kv(self) -> bool:
        """Whether the wire will report something: the KV worker must be polled."""
        return bool(self._book.handoffs.num_receiving or self._book.handoffs.num_sending)

    def stats(self) -> SchedulerStats:
        return self._book.stats()

    def take_events(self) -> tuple[RequestEvent, ...]:
        """Empty unless `collect_events` is set in the scheduler's settings."""
        return self._book.take_events()

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """Empty unless `collect_events` is set in the cache's settings."""
        return self._book.cache.take_events()

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, and return how many blocks those were.

        Nothing computed so far is hit again; requests under way are not disturbed.
        """
        return self._book.cache.reset(self._book.requests.values())

    def check(self) -> None:
        """Raise BlocksUnaccounted unless every block is accounted for exactly once."""
        self._book.check()
