"""Dispatches a request to nodes: attempts on changing nodes until one completes the answer."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

from baton.core.ids import HandoffId
from baton.router.answer import AnswerAssembler
from baton.router.dispatch.attempt import Attempt, DispatchedRequest
from baton.router.dispatch.foreign_prefills import ForeignPrefills
from baton.router.dispatch.node_rpcs import NodeCalls
from baton.router.dispatch.picture_legs import PictureLegs
from baton.router.dispatch.quarantine import Quarantine, QuarantineVerdict, TrackedAttempt
from baton.router.dispatch.retries import (
    AttemptFailures,
    CircuitBreakers,
    DispatchConfig,
    RetryBudget,
)
from baton.router.dispatch.route_finder import RouteFinder
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.request_scope import PromptPlacement, RequestContext
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route
from baton.router.routing.routing_view import RoutingRequest
from baton.router.values import AnswerPart, GenerateCall, TokenChunk
from baton.rpc.errors import (
    AdapterNotLoaded,
    FailureKind,
    NodeDraining,
    NodeFailed,
    PoisonedRequest,
)

# During a rollout, many nodes in a row may refuse before they have reported that they drain.
MAX_TOTAL_ATTEMPTS = 50


class Dispatcher:
    def __init__(
        self,
        *,
        table: NodeTable,
        node_calls: NodeCalls,
        profiles: ModelProfiles,
        clock: Callable[[], float],
        config: DispatchConfig,
        foreign_prefills: Sequence[ForeignPrefills] = (),
    ) -> None:
        self._table = table
        self._node_calls = node_calls
        self._profiles = profiles
        self._clock = clock
        self._config = config
        self._foreign_prefills = foreign_prefills
        self._breakers = CircuitBreakers(config.breakers)
        self._quarantine = Quarantine(self.wake)
        self._pictures = PictureLegs(table, node_calls, clock)
        self._routes = RouteFinder(table, config, self._breakers, self._quarantine, clock)

    def wake(self) -> None:
        self._routes.wake()

    async def run(
        self, call: GenerateCall, context: RequestContext, retry_budget: RetryBudget
    ) -> AsyncGenerator[AnswerPart, None]:
        """Run attempts until one completes. Each continues the answer where the last one failed."""
        retry_budget.note_request()
        request = DispatchedRequest(call, context, self._create_answer(call))
        for prefills in self._foreign_prefills:
            request.computed = request.computed or await prefills.compute_for(call, context)
        for number in itertools.count(1):
            context.trace.note_attempt_began(number, len(request.answer.token_ids))
            route = await self._find_route(request, number)
            with self._on_nodes(request, route) as (assignment, tracked):
                attempt = self._create_attempt(request, number, route, assignment, tracked)
                try:
                    if route.encoder is not None:
                        await self._pictures.bring(request, route, attempt)
                        self._quarantine.release_node(tracked, route.encoder.address)
                    async with aclosing(attempt.run(self._node_calls)) as parts:
                        async for part in parts:
                            if isinstance(part, TokenChunk):
                                self._quarantine.note_tokens(tracked, len(part.token_ids))
                            yield part
                    self._breakers.note_success(route.addresses)
                    return
                except NodeFailed as failure:
                    self._note_failure(request, attempt, tracked, failure)
                    is_last = number == MAX_TOTAL_ATTEMPTS
                    if is_last or not self._may_retry(request.failures, retry_budget):
                        raise

    def _create_answer(self, call: GenerateCall) -> AnswerAssembler:
        text = self._profiles.of(call.model).text
        detokenizer = text.create_detokenizer(call.shown_tokens)
        prompt = call.prompt_token_ids
        wants_prompt = call.sampling.prompt_logprobs is not None
        prompt_end = text.end_of(prompt) if call.shown_tokens else ""
        return AnswerAssembler(detokenizer, call.stop, len(prompt) * wants_prompt, prompt_end)

    async def _find_route(self, request: DispatchedRequest, number: int) -> Route:
        """Choose the nodes of an attempt. All attempts keep to the model revision of the first."""
        computed = request.computed
        wanted = RoutingRequest(
            prompt_token_ids=request.call.prompt_token_ids,
            prior_output_token_ids=request.answer.token_ids,
            model=request.call.model,
            media=request.call.token_prompt.media,
            cache_salt=request.cache_salt(number),
            revision=request.revision,
            task=request.call.task,
            has_foreign_kv=request.has_foreign_kv and number == 1,
            foreign_kv_readers=frozenset() if computed is None else computed.readers,
        )
        placement, prompt_node = request.context.placement, None
        if number == 1 and placement is not None and placement.has_kv:
            prompt_node = placement.decode
        route = await self._routes.find(
            wanted, request.failures.addresses, request.suspicion, prompt_node
        )
        request.revision = route.last.node.revision
        model = self._table.resolve(request.call.model)
        if model != request.call.model:
            request.call = replace(request.call, model=model)
        request.context.trace.note_routed(route, self._config.routing.policy, self._table)
        return route

    @contextmanager
    def _on_nodes(
        self, request: DispatchedRequest, route: Route
    ) -> Iterator[tuple[Assignment, TrackedAttempt]]:
        """Account for an attempt on its nodes until the end of the block."""
        assignment = Assignment(self._table, route, request.call.model.adapter.id)
        tracked = self._quarantine.track(request.suspicion, route)
        self._breakers.note_sent(route.addresses, self._clock())
        try:
            yield assignment, tracked
        finally:
            assignment.close()
            self._quarantine.end(tracked)

    def _create_attempt(
        self,
        request: DispatchedRequest,
        number: int,
        route: Route,
        assignment: Assignment,
        tracked: TrackedAttempt,
    ) -> Attempt:
        def note_prompt_done() -> None:
            assignment.note_prompt_done()
            if route.is_split:
                self._quarantine.release_node(tracked, route.first.node.address)

        handoff_id = HandoffId(request.own_id, number)
        prompt, salt = request.call.token_prompt, request.cache_salt(number)
        pixels = self._pictures.pixels_for(request, route, number) if prompt.pictures else ()
        now = self._clock()
        placement = PromptPlacement(prompt, route.last.node, salt)
        request.context.note_placement(placement)
        return Attempt(
            route=route,
            handoff_id=handoff_id,
            request=request.to_engine_request(handoff_id, now, pixels, is_paced=route.is_paced),
            answer=request.answer,
            context=request.context,
            clock=self._clock,
            on_prefilled=note_prompt_done,
            on_decoded=partial(request.context.note_placement, replace(placement, has_kv=True)),
        )

    def _note_failure(
        self,
        request: DispatchedRequest,
        attempt: Attempt,
        tracked: TrackedAttempt,
        failure: NodeFailed,
    ) -> None:
        """Record a failed attempt with the request and the breakers. Raises PoisonedRequest."""
        request.context.trace.note_attempt_failed()
        if attempt.lacked_pictures(failure):
            return  # the node is as good as before
        if isinstance(failure, AdapterNotLoaded):
            self._renew_adapter(request)
        is_drained = is_free = isinstance(failure, NodeDraining)
        for address, cause in attempt.failure_by_address.items():
            verdict = self._judge(request, tracked, address, cause)
            is_free |= (
                verdict is not QuarantineVerdict.ORDINARY
                and cause.kind is not FailureKind.PASS_FAILED
            )
        failed = frozenset(attempt.failure_by_address)
        # Ended nodes need no limit here: the quarantine limits them for each request.
        is_counted = not is_free and failure.kind is not FailureKind.VANISHED
        request.failures.note(
            failed, attempt.num_new_tokens, is_free=is_free, is_counted=is_counted
        )
        if not is_drained:
            broken = {
                address
                for address, cause in attempt.failure_by_address.items()
                if not isinstance(cause, AdapterNotLoaded)  # other requests can be served
            }
            self._breakers.note_failure(broken, self._clock())
        elif not request.answer.token_ids:
            request.revision = request.pinned_revision  # no token yet: it may begin with another

    def _renew_adapter(self, request: DispatchedRequest) -> None:
        """Use the adapter that the name means now, unless the answer has begun with the other."""
        model = request.call.model
        current = self._table.served.variants.get(model.name, model)
        if current.base == model.base and not request.answer.token_ids:
            request.call = replace(request.call, model=current)

    def _judge(
        self,
        request: DispatchedRequest,
        tracked: TrackedAttempt,
        address: str,
        cause: NodeFailed,
    ) -> QuarantineVerdict:
        """Return the quarantine's verdict on a failed attempt. Raises PoisonedRequest."""
        verdict = self._quarantine.judge(tracked, address, cause.kind)
        if verdict is not QuarantineVerdict.ORDINARY:
            request.context.trace.note_verdict(verdict.value, address)
        if verdict is QuarantineVerdict.POISON:
            raise PoisonedRequest(
                f"nodes fail when they run this request; it is not tried again, nor should it be "
                f"sent again before the cause is found. The last failure was: {cause}"
            ) from cause
        return verdict

    def _may_retry(self, failures: AttemptFailures, retry_budget: RetryBudget) -> bool:
        """Return whether another attempt is allowed.

        Retries after progress, and those caused by draining or by an engine's end, do not count
        against the retry budget. A node that vanishes does, but not against `max_attempts`.
        """
        if failures.num >= self._config.max_attempts:
            return False
        return failures.is_paid or retry_budget.spend()


class Assignment:
    """Load and expected prefixes of one attempt."""

    def __init__(self, table: NodeTable, route: Route, adapter: str = "") -> None:
        """`adapter` is the id of that of the request; empty: none."""
        self._table = table
        self._route = route
        self._adapter = adapter
        self._last_load = table.node_load(route.last.node)
        self._prompt_load = table.node_load(route.first.node)
        self._addresses = [leg.node.address for leg in route.legs]
        self._is_prompt_done = False
        self._last_load.note_sent(adapter)
        self._prompt_load.num_sent_tokens += route.num_missing_tokens
        if route.is_split:
            self._prompt_load.note_sent(adapter)
        table.note_use(self._last_load, self._prompt_load)
        for address in self._addresses:
            table.prefixes.expect(address, route.block_names)

    def note_prompt_done(self) -> None:
        """Remove the prompt from the load once its KV is computed."""
        if self._is_prompt_done:
            return
        self._is_prompt_done = True
        self._prompt_load.num_sent_tokens -= self._route.num_missing_tokens
        if self._route.is_split:
            self._prompt_load.note_request_ended(self._adapter)

    def close(self) -> None:
        """Remove the attempt from the load. Call once.

        The prefix of a prompt that was not computed is no longer expected.
        """
        if not self._is_prompt_done:
            for address in self._addresses:
                self._table.prefixes.cancel_expected(address, self._route.block_names)
        self.note_prompt_done()
        self._last_load.note_request_ended(self._adapter)
