"""Simulated engine: a scheduler, a fake runner and a hostile fake wire, driven by a test.

The wire writes garbage into every block that it may still write, at every step, and reads
every block that it was asked to send, at every step. What a request gets is compared with
what it would have got alone.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.ids import AdapterRef, HandoffId, NodeId, Peer, RequestId
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.media import MediaSegment, Picture, StoredPicture, picture_salt
from baton.core.output import FinishReason, Output
from baton.core.pause_mode import PauseMode
from baton.core.request import (
    EMBED,
    PREFETCH,
    EngineRequest,
    PrefixSource,
    ReceiveKv,
    Task,
    task_of,
)
from baton.core.sampling import SamplingParams
from baton.engine.containment import Containment
from baton.engine.errors import FollowedPassFailed, PassHookFailed, PassSkipped
from baton.engine.events import KvEvent
from baton.engine.kv_arrival.arrivals import KvSources
from baton.engine.kv_arrival.pulls import PullConfig
from baton.engine.kv_cache.block_names import group_of, name_in_group, snapshot_end, snapshot_names
from baton.engine.kv_cache.groups import ONE_GROUP, CacheConfig, CacheLayout, KvGroup
from baton.engine.plan import Pending, Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.external_kv import Load, LoadId
from baton.kv_transfer.kv_connector import GuardedConnector
from baton.kv_transfer.types import KvOrders, KvReports
from baton.rpc.cached_prefixes import CachedPrefixes
from tests.support.fake_external import FakeExternal
from tests.support.fake_runner import (
    Crash,
    CrashPlace,
    FakeRunner,
    KvTensor,
    Slot,
    content_of,
    empty_content,
    seen_tokens,
    tokens_alone,
    vector_of,
)
from tests.support.fake_wire import FakeWire, context_of, seen_context
from tests.support.scheduler_state import is_idle

VOCAB_SIZE = 11
BLOCKS_PER_RUN = 2
IDLE_S = 0.05  # at which an engine without work looks for reports, in virtual time
SOURCE = Peer(NodeId("prefill-0"), "127.0.0.1:1")
OTHER_SOURCE = Peer(NodeId("prefill-1"), "127.0.0.1:2")


def pictures_of(media: Sequence[MediaSegment]) -> tuple[Picture, ...]:
    """Return pictures of a pixel each."""
    digests = dict.fromkeys(segment.digest for segment in media)
    return tuple(Picture(digest, 1, 1, digest[:3]) for digest in digests)


@dataclass(slots=True)
class Receipt:
    """Outputs that one client received for one request."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, output: Output) -> None:
        num_prior = len(self.request.prior_output_token_ids)
        assert self.finish_reason is None, f"{output} came after the end"
        assert output.first_index == num_prior + len(self.token_ids), "a gap or a repeat"
        self.token_ids += output.token_ids
        self.outputs.append(output)
        self.finish_reason = output.finish_reason


class _Strict:
    """Runner that reports all errors except injected crashes as faults of the engine."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def run(self, plan: Plan) -> RunResult:
        return self.launch(plan).collect()

    def launch(self, plan: Plan) -> Pending:
        try:
            return self._runner.launch(plan)
        except Crash:
            raise
        except Exception as bug:
            raise PassHookFailed(bug) from bug


class _LaunchedPass:
    """Pass that is launched when it must be, or earlier: if the one before it allows that, before
    that one is collected. It is skipped if that one fails.
    """

    def __init__(self, runner: _Strict, plan: Plan, after: _LaunchedPass | None) -> None:
        self.plan = plan
        self._runner = runner
        self._after = after
        self._pending: Pending | None = None
        self._result: RunResult | None = None
        self._error: Exception | None = None
        self.is_followed = False  # the next one was launched

    def launch(self) -> None:
        """Launch it, unless that has been done, or its turn has not come or never comes."""
        if self._pending is not None or self._error is not None:
            return
        if self._after is not None:
            self._after.launch()
            if not self._after.allows(self.plan):
                self._after.end()
        try:
            self._skip_if_due()
            if self._after is not None:
                self._after.is_followed = True
            self._pending = self._runner.launch(self.plan)
        except Exception as error:  # noqa: BLE001 - `collect` raises it
            self._error = error

    def allows(self, plan: Plan) -> bool:
        return self._pending is not None and self._pending.allows(plan)

    def end(self) -> None:
        """Collect it, unless that has been done. Those before it have been collected."""
        self.launch()
        if self._pending is None or self._result is not None or self._error is not None:
            return
        try:
            self._skip_if_due()
            self._result = self._pending.collect()
        except PassSkipped as skipped:
            self._error = skipped
        except Exception as error:  # noqa: BLE001 - `collect` raises it
            self._error = FollowedPassFailed(error) if self.is_followed else error
        self._after = None

    def _skip_if_due(self) -> None:
        if self._after is not None and self._after._error is not None:
            raise PassSkipped("the pass before it has failed")

    def collect(self) -> RunResult:
        self.end()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class EngineWorld:
    """Simulated engine. Each method is one event."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        groups: tuple[KvGroup, ...] = ONE_GROUP,
        num_state_blocks: int = 0,
        enable_prefix_caching: bool = True,
        chance: random.Random | None = None,
        external_chance: random.Random | None = None,  # None: without an external KV cache
        external_fails: bool = True,
        runs_ahead: bool = False,  # plans the next step before the result of a pass is known
    ) -> None:
        self.runs_ahead = runs_ahead
        self._ahead: _LaunchedPass | None = None
        self._pass_chance = random.Random(0)  # of whether a pass runs early
        self.num_ahead: Counter[str] = Counter()  # plans that were made so, by what they contain
        self.config = config or SchedulerConfig()
        self.specs = tuple(group.spec for group in groups)
        self.num_state_blocks = num_state_blocks
        self.cache_config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            layout=CacheLayout(
                groups, num_state_blocks, num_drafted=self.config.num_lookahead_tokens
            ),
            enable_prefix_caching=enable_prefix_caching,
            collect_events=True,
            collect_token_ids=True,
        )
        self.kv = KvTensor(num_blocks, block_size)
        self.external: FakeExternal | None = None
        self._connector: GuardedConnector | None = None
        if external_chance is not None:
            self.external = FakeExternal(self.kv, external_chance, fails=external_fails)
            self._connector = GuardedConnector("fake", self.external)
        pulls = PullConfig("pull-here", block_bytes=1, max_run_blocks=BLOCKS_PER_RUN)
        sources = KvSources(self._connector, pulls=pulls)
        self.scheduler = Scheduler(self.config, self.cache_config, sources)
        self.runner = FakeRunner(
            self.kv,
            VOCAB_SIZE,
            self.specs,
            num_state_blocks,
            self.config.num_lookahead_tokens,
            self.config.max_model_len,
            self.config.max_num_seqs,
            chance or random.Random(0),
            max_loras=self.config.max_loras,
            pools_all_tokens=self.config.needs_all_tokens(EMBED),
            whole_pictures=self.config.whole_pictures,
        )
        self._passes = _Strict(self.runner)
        self.containment = Containment(self._passes.run, self.scheduler)
        self.wire = FakeWire(self.kv, VOCAB_SIZE, self.specs, num_state_blocks)
        self.receipts: dict[RequestId, Receipt] = {}
        self.cached = CachedPrefixes()
        self._kv_events: list[KvEvent] = []
        self.now_s = 0.0
        self._token_s: float | None = None  # None: steps take no time, and prompts cost nothing
        self._num_requested = 0
        self._is_at_rest = False  # the last step did nothing, and nothing happened since
        # Of each request, since it last lost its blocks: time that it waited for fills.
        self._followed_s: defaultdict[tuple[RequestId, int, bool], float] = defaultdict(float)

    # --- requests -----------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int] | int = 6,
        *,
        request_id: str | None = None,
        receives: bool = False,
        sends: bool = False,
        prior: Sequence[int] = (),
        priority: int = 0,
        arrival_s: float = 0.0,
        age_s: float = 0.0,
        cache_salt: str = "",
        max_tokens: int = 4,
        sampling: SamplingParams | None = None,
        source: Peer = SOURCE,
        is_paced: bool = False,
        num_promised: int | None = None,
        kv_hints: KvHints = NO_KV_HINTS,
        adapter: str = "",
        task: Task | None = None,
        media: Sequence[MediaSegment] = (),
        has_pixels: bool = True,
        num_reported: int = 0,
    ) -> RequestId:
        """Add a request. An integer prompt is a prompt of that length with a common prefix.

        A peer is said to have the KV of the first `num_promised` tokens, and this engine to have
        that of `num_reported`, so that the pictures in them have no pixels.
        """
        name = RequestId(request_id or f"r{len(self.receipts)}")
        handoff_id = HandoffId(name, 1)
        task = task or task_of(kv_hints)
        sampling = task.sampling or sampling or SamplingParams(max_tokens=max_tokens)
        unreported = [each for each in media if each.start + each.num_tokens > num_reported]
        engine_request = EngineRequest(
            request_id=name,
            prompt_token_ids=_prompt(prompt),
            sampling=sampling,
            seed=len(self.receipts),
            task=task,
            priority=priority,
            arrival_s=arrival_s,
            age_s=age_s,
            cache_salt=cache_salt,
            prior_output_token_ids=() if task.is_pooling else tuple(prior),
            receive_from=ReceiveKv(handoff_id, source) if receives else None,
            send_to=handoff_id if sends else None,
            is_paced=is_paced,
            prefix_source=None if num_promised is None else PrefixSource(source, num_promised),
            kv_hints=kv_hints,
            adapter=AdapterRef(adapter, adapter),
            media=tuple(media),
            # A decode node gets no pixels.
            pictures=pictures_of(unreported) if has_pixels and not receives else (),
        )
        self.scheduler.adapters.add(adapter)
        self._is_at_rest = False
        self.scheduler.add(engine_request)
        self.receipts[name] = Receipt(engine_request)
        self.wire.expect(engine_request)
        self._cache_at_peers(engine_request)
        return name

    def fetch(self, stored: StoredPicture, cache_salt: str = "") -> RequestId:
        """Add a request that pulls the encoding of a picture from a peer, which has it."""
        return self.add(
            stored.token_ids,
            cache_salt=picture_salt(cache_salt),
            kv_hints=KvHints(prefetch=True),
            num_promised=stored.num_cached_tokens,
            media=stored.media,
            has_pixels=False,
        )

    def _cache_at_peers(self, engine_request: EngineRequest) -> None:
        """Let the peers have all blocks of a request and its answer."""
        token_ids = [*context_of(engine_request), *self.alone(engine_request)[0]]
        seen = seen_tokens(token_ids, engine_request.media)
        naming = self.cache_config.naming
        names = naming.names(
            token_ids, len(engine_request.prompt_token_ids), engine_request.prefix_keys
        )
        size = self.cache_config.block_size
        adapter = engine_request.adapter.id
        content = empty_content(self.specs, self.num_state_blocks, adapter)
        for place, name in enumerate(names):
            block = range(place * size, (place + 1) * size)
            for position in block:
                content.append(seen[position], self.specs)
            its: dict[bytes, list[Slot]] = {
                name_in_group(name, group): slots[block.start : block.stop]
                for group, slots in enumerate(content.slots)
            }
            parts = snapshot_names(name, len(self.specs), self.num_state_blocks)
            its |= {part: [slot] * size for part, slot in zip(parts, content.state, strict=True)}
            self.wire.know(its)

    def request_blocks(self, names: Sequence[bytes]) -> HandoffId:
        """Let a peer pull these blocks."""
        self._is_at_rest = False
        self._num_requested += 1
        handoff_id = HandoffId("pull-there", self._num_requested)
        self.wire.request(handoff_id, names)
        return handoff_id

    def abort(self, request_id: RequestId) -> None:
        self._is_at_rest = False
        self.scheduler.abort(request_id)

    def withdraw_completed(self, handoff_id: HandoffId) -> None:
        self._is_at_rest = False
        self.scheduler.withdraw_completed(handoff_id, "nobody wants it")

    def pause(self, mode: PauseMode) -> None:
        """Pause the scheduler. Checks that it comes to rest, unless requests go on to their end."""
        self._is_at_rest = False
        self.scheduler.pause(mode)
        if mode is not PauseMode.WAIT:
            for _ in range(2 + self.runs_ahead):
                self.step()
            assert self.scheduler.has_paused

    def resume(self) -> None:
        self._is_at_rest = False
        self.scheduler.resume()

    def reset_prefix_cache(self, *, reset_running: bool = False) -> None:
        self._is_at_rest = False
        self.scheduler.reset_prefix_cache(reset_running=reset_running)

    def crash(self, request_id: RequestId, place: CrashPlace) -> None:
        """Fail every further pass that contains this request."""
        self.runner.crashing[request_id] = place

    def fail_next_token(self, request_id: RequestId) -> None:
        self.runner.failing.add(request_id)

    def wait(self, seconds: float) -> None:
        """Advance the time. The engine wakes up regularly while hand-offs are in progress."""
        self._is_at_rest = False
        self.now_s += seconds
        for each in self.scheduler._state.waiting.followers():
            self._followed_s[_life_of(each)] += seconds

    def price(
        self, token_s: float, block_s: float, draw_error: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Let steps take `token_s` for each token, and loads at least `block_s` for each block."""
        assert self.external is not None
        self._token_s = token_s
        self.external.block_s = block_s
        self.external.draw_error = draw_error
        self._let_each_load_take(lambda load: block_s * len(load.names))

    def let_loads_take(self, draw_s: Callable[[], float]) -> None:
        """Let each load from the external KV cache take at least the time that is drawn for it."""
        self._let_each_load_take(lambda _: draw_s())

    def _let_each_load_take(self, duration_s: Callable[[Load], float]) -> None:
        assert self.external is not None
        due_s: dict[LoadId, float] = {}

        def is_due(load: Load) -> bool:
            if load.load_id not in due_s:
                due_s[load.load_id] = self.now_s + duration_s(load)
            return due_s[load.load_id] <= self.now_s

        self.external.is_due = is_due

    def evict_cached(self) -> None:
        """Empty the prefix cache, as another request that needs all free blocks would."""
        self._is_at_rest = False
        cache = self.scheduler._state.cache
        cache.pool.release(cache.prefixes.allocate(cache.pool.num_free))

    # --- the engine ---------------------------------------------------------------

    def step(self) -> Plan:
        launched = self._ahead or self._launch(self.scheduler.schedule(self.now_s))
        plan, self._ahead = launched.plan, None
        next_plan = None
        if self.runs_ahead and not self.containment.must_end_first(plan):
            next_plan = self.scheduler.schedule_ahead(self.now_s)
        if next_plan is not None:
            self._ahead = self._launch_ahead(next_plan, launched)
        elif self.runs_ahead:
            self._start_orders(self.scheduler.take_kv_orders())
        if self.runs_ahead:
            self._land_during_pass()
        run = self.containment.run(plan, launched.collect)
        if not self.containment._num_crashes_in_a_row:
            self._forget_ended_crashes()
        reports = self.wire.poll()
        if self._connector is not None:
            reports = reports.joined(self._connector.poll(self.now_s))
        now = self._spend_time(plan)
        outputs = self.scheduler.update(plan, run, reports, now)
        for output in outputs:
            self.receipts[output.request_id].take(output)
        self.scheduler.check()
        self._check_events()
        self._check_limits(plan, run)
        self._check_rest(plan, reports != KvReports())
        return plan

    def _land_during_pass(self) -> None:
        """Let transfers make progress before a pass that may still write its blocks."""
        wanted = self.wire.wanted()
        if wanted and self._pass_chance.random() < 0.5:
            self.wire.land(wanted[0])

    def _launch_ahead(self, plan: Plan, after: _LaunchedPass) -> _LaunchedPass:
        self.num_ahead.update(_kinds(plan, self))
        launched = self._launch(plan, after)
        if self._pass_chance.random() < 0.5:
            launched.launch()
        return launched

    def _launch(self, plan: Plan, after: _LaunchedPass | None = None) -> _LaunchedPass:
        self._start_orders(plan.kv_orders)
        return _LaunchedPass(self._passes, plan, after)

    def _start_orders(self, orders: KvOrders) -> None:
        self._check_waits()
        self.wire.start(orders)
        self.wire.misbehave()
        if self._connector is not None and self.external is not None:
            self._connector.start(orders, self.now_s)
            self.external.misbehave()

    def _forget_ended_crashes(self) -> None:
        """Forget the crashes of requests that have ended: a pass without any is between them."""
        for request_id in self.runner.crashing.keys() - self.living():
            del self.runner.crashing[request_id]

    def _spend_time(self, plan: Plan) -> float | None:
        if self._token_s is None:
            return None
        self.wait(sum(plan.num_scheduled_tokens.values()) * self._token_s)
        return self.now_s

    def step_until(self, is_it: Callable[[Plan], object], max_steps: int = 100) -> Plan:
        """Step until a plan satisfies the predicate, and return it."""
        for _ in range(max_steps):
            if is_it(plan := self.step()):
                return plan
        raise AssertionError(f"it did not come to that in {max_steps} steps")

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call."""
        self._check_events()
        events, self._kv_events = tuple(self._kv_events), []
        return events

    def _check_events(self) -> None:
        """Check that the KV events name exactly the cached blocks of the first group.

        They do not name blocks that were loaded for a peer, whose tokens are not known here.
        """
        events = self.scheduler.take_kv_events()
        self.cached.take(events)
        self._kv_events += events
        pool = self.scheduler._state.cache.pool
        if self.num_state_blocks:
            return
        cached = {name for name in pool.names if group_of(name) == 0}
        assert self.cached.names <= cached | set(pool._evicted)
        assert self.external is not None or self.cached.names >= cached

    @property
    def num_snapshots(self) -> int:
        """Number of recurrent states in the prefix cache."""
        names = self.scheduler._state.cache.pool.names
        return len(set(filter(None, map(snapshot_end, names))))

    def run_to_end(self, max_steps: int = 2000) -> None:
        """Run until all requests have ended, and check that all blocks are free."""
        self.resume()
        for _ in range(max_steps):
            is_all_done = is_idle(self.scheduler) and self._ahead is None
            if is_all_done and not self.wire.open_requests():
                break
            self.wire.settle()
            if self.step() == Plan() and self._token_s is not None:
                self.wait(IDLE_S)
        assert not self.wire.open_requests(), "pulls of peers never ended"
        assert is_idle(self.scheduler), f"not all ended: {self.scheduler.stats()}"
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert not self.scheduler._state.adapters, "places of adapters are taken"
        for receipt in self.receipts.values():
            self.check_receipt(receipt)

    def living(self) -> list[RequestId]:
        return [name for name, receipt in self.receipts.items() if receipt.finish_reason is None]

    def finish_reason(self, request_id: RequestId) -> FinishReason | None:
        return self.receipts[request_id].finish_reason

    def tokens(self, request_id: RequestId) -> list[int]:
        return self.receipts[request_id].token_ids

    # --- invariants ---------------------------------------------------------------

    def check_receipt(self, receipt: Receipt) -> None:
        if receipt.request.task.is_pooling:
            self._check_pooled(receipt)
            return
        if receipt.request.task is PREFETCH:
            self._check_prefetch(receipt)
            return
        expected, reason = self.alone(receipt.request)
        if receipt.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert receipt.token_ids == expected[: len(receipt.token_ids)]
            return
        assert receipt.token_ids == expected, f"{receipt.request} got {receipt.token_ids}"
        assert receipt.finish_reason is reason
        self._check_account(receipt)

    def _check_prefetch(self, receipt: Receipt) -> None:
        (output,) = receipt.outputs
        assert not output.token_ids
        assert output.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        assert output.served is not None
        assert not output.served.num_prefilled_tokens

    def _check_pooled(self, receipt: Receipt) -> None:
        (output,) = receipt.outputs
        assert not output.token_ids
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert not output.vector
            return
        request = receipt.request
        content = content_of(
            seen_context(request), self.specs, self.num_state_blocks, request.adapter.id
        )
        needs_all = self.config.needs_all_tokens(EMBED)
        assert output.vector == vector_of(content, self.specs, needs_all)
        assert output.finish_reason is FinishReason.STOP

    def _check_account(self, receipt: Receipt) -> None:
        """Check the counts of prompt tokens, draft tokens and prompt logprobs."""
        served = receipt.outputs[-1].served
        assert served is not None
        num_had = (
            served.num_cached_tokens + served.num_received_tokens + served.num_prefilled_tokens
        )
        num_context = len(context_of(receipt.request))
        assert num_had == num_context or served.num_preemptions
        # The token that ends the answer may have cut off accepted drafts.
        num_more = sum(max(0, len(output.token_ids) - 1) for output in receipt.outputs)
        assert num_more <= served.num_accepted_tokens <= served.num_proposed_tokens
        num_seen = sum(len(output.prompt_logprobs) for output in receipt.outputs)
        wants_all = receipt.request.sampling.prompt_logprobs is not None
        if receipt.request.receive_from is None:
            assert num_seen == wants_all * len(receipt.request.prompt_token_ids)

    def alone(self, engine_request: EngineRequest) -> tuple[list[int], FinishReason]:
        """Return the outputs and the finish reason of the request when it runs alone."""
        sampling, context = engine_request.sampling, context_of(engine_request)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self.config.eos_token_ids
        num_prior = len(engine_request.prior_output_token_ids)
        room = self.config.max_model_len - len(context)
        count = min(sampling.max_tokens - num_prior, room)
        answer = tokens_alone(
            seen_context(engine_request),
            engine_request.seed,
            0 if engine_request.task.is_pooling else count,
            VOCAB_SIZE,
            self.specs,
            self.num_state_blocks,
            engine_request.adapter.id,
        )
        for place, token_id in enumerate(answer):
            if token_id in stops and num_prior + place + 1 >= sampling.min_tokens:
                answer, reason = answer[: place + 1], FinishReason.STOP
                break
        else:
            reason = FinishReason.LENGTH
        if engine_request.send_to is not None and len(answer) > 1:
            return answer[:1], FinishReason.HANDED_OFF
        return answer, reason

    def _check_limits(self, plan: Plan, run: RunResult) -> None:
        assert len(plan.num_scheduled_tokens) <= self.config.max_num_seqs
        num_tokens = sum(plan.num_scheduled_tokens.values()) + sum(run.num_proposed.values())
        assert num_tokens <= self.config.max_num_batched_tokens

    def _check_waits(self) -> None:
        """Check that no request waits longer for its prefix than the settings say, in sum."""
        limit_s = self.config.max_fill_wait_s + 1e-6  # of sums of many floats
        for each in self.scheduler._state.waiting.followers():
            waited_s = self._followed_s[_life_of(each)]
            assert waited_s < limit_s, f"{each.request_id} waited for {waited_s} s"

    def _check_rest(self, plan: Plan, has_reports: bool) -> None:
        """Check that a step without effect leaves no work: the engine thread sleeps then."""
        assert plan == Plan() or not self._is_at_rest, f"it would have slept over {plan}"
        is_done = not has_reports and not self.scheduler.is_cut_short
        self._is_at_rest = plan == Plan() and is_done


def _kinds(plan: Plan, world: EngineWorld) -> Iterator[str]:
    """Yield the kinds of work in a plan, and `all`."""
    pending = world.scheduler._state.batch.pending
    yield "all"
    if pending[1].num_decodes:
        yield "drafts" if plan.max_draft_tokens else "decodes"
    if pending[1].chunks:
        yield "prompts"
    if pending[0].chunks:
        yield "after prompts"
    if plan.started:
        yield "admissions"
    if plan.kv_orders.receives:
        yield "grants"
    if plan.kv_orders.external.loads:
        yield "loads"
    if world.num_state_blocks:
        yield "states"
    if plan.state_copies:
        yield "snapshots"


def _life_of(request: Request) -> tuple[RequestId, int, bool]:
    """Return what differs after a request has lost its blocks, or the KV of its hand-off."""
    return request.request_id, request.num_preemptions, request.is_resumed


def _prompt(prompt: Sequence[int] | int) -> tuple[int, ...]:
    if isinstance(prompt, int):
        return tuple(n % VOCAB_SIZE for n in range(prompt))
    return tuple(prompt)
