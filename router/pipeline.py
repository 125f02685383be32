"""Path of a request through the router: tokenise, admit, route, dispatch, assemble the answer."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from kv_transfer.types import HandoffId
from router.admission.admission import AdmissionGate
from router.admission.admission_queue import INITIAL_CAPACITY, AdmissionQueueConfig
from router.admission.answer_forecast import AnswerForecast
from router.admission.retry_budget import RetryBudget
from router.admission.wait_forecast import FirstTokenForecast
from router.answer import AnswerAssembler
from router.context import RequestContext
from router.dispatch.attempt import Attempt
from router.dispatch.failures import AttemptFailures
from router.dispatch.node_rpcs import NodeCalls
from router.dispatch.quarantine import Quarantine, QuarantineVerdict, Suspicion, TrackedAttempt
from router.input_processing.form_checks import NO_FORM_CHECKS, FormChecks
from router.input_processing.large_texts import LargeTextConfig, LargeTexts
from router.input_processing.logprob_limits import LogprobBudget, check_prompt_logprobs_fit
from router.input_processing.tokenization import TextBoundary
from router.routing.assignment import Assignment
from router.routing.breakers import BreakerConfig, CircuitBreakers
from router.routing.node_table import Node, NodeTable
from router.routing.policy import Route, Routing, RoutingRequest, choose
from router.shared_prompt import SharedPrompt
from router.values import CompletionSummary, GenerateCall, Prompt, TokenChunk
from rpc.errors import (
    Draining,
    EmptyPrompt,
    FailureKind,
    IncompatibleNodes,
    NodeDraining,
    NodeFailed,
    NoNodes,
    PoisonedRequest,
    RequestIdInUse,
    TooLate,
    UnknownModel,
)
from rpc.messages.sequences import Sequence
from rpc.node_info import NodeRole
from text.token_text import TokenText

SEED_BITS = 63
NONCE_BYTES = 8
MARGIN = 1.25  # forecasts are inexact, and requests of a higher priority overtake
# During a rollout, many nodes in a row may refuse before they have reported that they drain.
MAX_TOTAL_ATTEMPTS = 50
MAX_REMEMBERED_BAD_WORDS = 16


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    max_attempts: int = 3  # consecutive attempts without a new token
    node_patience_s: float = 0.0  # how long a request waits for a decode node
    quarantine_patience_s: float = 10.0  # how long it waits for nodes that are in quarantine
    retry_pause_s: float = 0.2  # before a node that has just failed is tried again
    routing: Routing = field(default_factory=Routing)
    breakers: BreakerConfig = field(default_factory=BreakerConfig)
    line: AdmissionQueueConfig = field(default_factory=AdmissionQueueConfig)
    large_texts: LargeTextConfig = field(default_factory=LargeTextConfig)


class Pipeline:
    def __init__(
        self,
        *,
        table: NodeTable,
        node_calls: NodeCalls,
        text: TextBoundary,
        clock: Callable[[], float],
        config: PipelineConfig,
        forms: FormChecks = NO_FORM_CHECKS,
    ) -> None:
        self._table = table
        self._node_calls = node_calls
        self._text = text
        # All answers of a request look up the same words at the same time.
        self._spellings = lru_cache(MAX_REMEMBERED_BAD_WORDS)(self._compute_spellings)
        self._forms = forms
        self._large_texts = LargeTexts(config.large_texts)
        self._clock = clock
        self._config = config
        self._numbers = itertools.count()
        self._admission = AdmissionGate(config.line, clock)
        self._forecast = FirstTokenForecast()
        self._answer_forecast = AnswerForecast()
        self._breakers = CircuitBreakers(config.breakers)
        self._quarantine = Quarantine(self._wake)
        self._retry_budget = RetryBudget(config.line.max_in_flight or INITIAL_CAPACITY)
        self._ids_in_use: set[str] = set()
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self._nodes_changed = asyncio.Event()
        self.is_draining = False

    def handle_nodes_changed(self) -> None:
        """Handle a change of the table: admit up to the new capacity, wake waiting requests."""
        self._admission.resize(self._table.num_batch_slots)
        self._wake()

    def _wake(self) -> None:
        """Wake the requests that wait for a node."""
        self._nodes_changed.set()
        self._nodes_changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Number of requests in the admission queue."""
        return self._admission.num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._admission.num_in_flight

    async def drain(self) -> None:
        """Refuse new requests, and return when all current ones have ended."""
        self.is_draining = True
        await self._became_idle.wait()

    async def generate(
        self, call: GenerateCall, context: RequestContext
    ) -> AsyncGenerator[TokenChunk | CompletionSummary, None]:
        """Yield the pieces of the answer, then its `GenerationEnd`.

        Closing the generator early cancels the request on all nodes.
        """
        if self.is_draining:
            raise Draining("this router is shutting down; send the request to another one")
        self.check_model(call.model)
        with self._reserve_id(call.request_id), _sharing(context) as (shared, is_first):
            shared_decode = None if is_first else await shared.decode_node()
            call = self._ban_bad_words(call)
            prompt = await self._tokenize_prompt(call, context, shared)
            call = self._cap_max_tokens(call, len(prompt))
            if is_first:
                _check_prompt_logprobs(call, len(prompt), context, shared)
            await self._forms.check(call.sampling.structured_outputs)
            attempts = self._run_sharing_prompt(call, prompt, context, shared, shared_decode)
            with self._forecasting_wait(call, context) as note_began:
                async with self._admission.turn(call.priority), aclosing(attempts) as pieces:
                    # The wait may have exceeded the forecast: do not start work that is too late.
                    self._refuse_if_too_late(call, context, 0.0, self.num_in_flight - 1)
                    context.trace.note_admitted()
                    with self._measuring_pace() as note_part:
                        async for piece in pieces:
                            note_began()
                            note_part(piece)
                            yield piece

    def check_model(self, model: str) -> None:
        """Raises UnknownModel if nodes are known and none of them serves `model`."""
        served = self._table.models
        if model and served and model not in served:
            names = ", ".join(sorted(served))
            raise UnknownModel(f"model {model!r} is not served here; served: {names}")

    async def token_ids(self, prompt: Prompt, model: str = "") -> tuple[int, ...]:
        """Tokenise a prompt. Raises InvalidRequest if its text exceeds the context length."""
        read = partial(self._text.token_ids, prompt, self._table.max_model_len(model))
        return await self._large_texts.read(prompt.num_characters, read)

    async def spelled(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of `token_ids`."""
        return await self._large_texts.read(len(token_ids), partial(self._text.text, token_ids))

    @property
    def supports_tools(self) -> bool:
        """True if the model's chat template reads `tools`."""
        return self._text.supports_tools

    def token(self, token_id: int) -> TokenText:
        """Return the text of a single token, for logprobs."""
        return self._text.token(token_id)

    async def _tokenize_prompt(
        self, call: GenerateCall, context: RequestContext, shared: SharedPrompt
    ) -> tuple[int, ...]:
        """Return the prompt's token ids, tokenised once for all answers. Raises EmptyPrompt."""
        prompt = shared.token_ids or await self.token_ids(call.prompt, call.model)
        shared.token_ids = prompt
        context.trace.note_tokenized(len(prompt), self._admission.num_waiting)
        if not prompt:
            raise EmptyPrompt("the prompt has no tokens; there is nothing to continue")
        return prompt

    def _cap_max_tokens(self, call: GenerateCall, num_prompt_tokens: int) -> GenerateCall:
        """Lower a default `max_tokens` to what the KV cache of every decode node can hold."""
        longest = self._table.max_sequence_len(call.model)
        if not call.fills_context or longest is None:
            return call
        least = max(1, call.sampling.min_tokens)
        max_tokens = max(least, longest - num_prompt_tokens)
        if max_tokens >= call.sampling.max_tokens:
            return call
        return replace(call, sampling=replace(call.sampling, max_tokens=max_tokens))

    def _ban_bad_words(self, call: GenerateCall) -> GenerateCall:
        """Replace `bad_words` by banned token sequences: nodes have no tokenizer."""
        if not call.bad_words:
            return call
        banned = (*call.sampling.banned_sequences, *self._spellings(call.bad_words))
        return replace(call, sampling=replace(call.sampling, banned_sequences=banned))

    def _compute_spellings(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        sequences = {tokens for word in words for tokens in self._text.spellings(word)}
        return tuple(sorted(sequences))

    @contextmanager
    def _forecasting_wait(
        self, call: GenerateCall, context: RequestContext
    ) -> Iterator[Callable[[], None]]:
        """Yield a callback for the first part of the answer. Raises TooLate."""
        wait_s = self._forecast.wait_s(call.priority)
        self._refuse_if_too_late(call, context, wait_s, self.num_in_flight)
        priority = call.priority
        self._forecast.came(priority, self._clock())
        self._retry_budget.note_request()
        has_begun = False

        def note_began() -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self._forecast.began(priority, self._clock())

        try:
            yield note_began
        finally:
            if not has_begun:
                self._forecast.left(priority)

    @contextmanager
    def _measuring_pace(self) -> Iterator[Callable[[TokenChunk | CompletionSummary], None]]:
        """Yield a callback for each part of an answer, and record the answer's pace at the end."""
        began_s = last_s = self._clock()
        num_tokens, is_complete = 0, False

        def note_part(part: TokenChunk | CompletionSummary) -> None:
            nonlocal last_s, num_tokens, is_complete
            if isinstance(part, CompletionSummary):
                is_complete = True
            elif part.token_ids:
                last_s = self._clock()
                num_tokens += len(part.token_ids)

        try:
            yield note_part
        finally:
            duration_s = last_s - began_s
            self._answer_forecast.given(
                num_tokens, duration_s, self.num_in_flight, is_whole=is_complete
            )

    def _refuse_if_too_late(
        self, call: GenerateCall, context: RequestContext, wait_s: float, num_others: int
    ) -> None:
        """Raise TooLate if a request that waits `wait_s` cannot meet its deadline.

        Refused early, its client can still send it to another router.
        """
        remaining_s = context.remaining_s(self._clock())
        if remaining_s is None:
            return
        answer_s = self._answer_forecast.lasts_s(call.sampling.max_tokens, num_others)
        if MARGIN * (wait_s + answer_s) > remaining_s:
            raise TooLate(
                f"its turn would come in about {wait_s:.1f} s and the answer take "
                f"{answer_s:.1f} s, with {MARGIN - 1:.0%} in reserve, but the client waits for "
                f"{remaining_s:.1f} s",
                MARGIN * (wait_s + answer_s) - remaining_s,
            )

    def _run_sharing_prompt(
        self,
        call: GenerateCall,
        prompt: tuple[int, ...],
        context: RequestContext,
        shared: SharedPrompt,
        shared_decode: Node | None,
    ) -> AsyncGenerator[TokenChunk | CompletionSummary, None]:
        """Run the attempts for one answer, reusing prompt logprobs that another answer has."""
        if call.sampling.prompt_logprobs is None:
            return self._run_attempts(call, prompt, context, shared, shared_decode)
        if shared.prompt_logprobs:
            call = replace(call, sampling=replace(call.sampling, prompt_logprobs=None))
        attempts = self._run_attempts(call, prompt, context, shared, shared_decode)
        return shared.with_prompt_logprobs(attempts)

    async def _run_attempts(
        self,
        call: GenerateCall,
        prompt: tuple[int, ...],
        context: RequestContext,
        shared: SharedPrompt,
        shared_decode: Node | None,
    ) -> AsyncGenerator[TokenChunk | CompletionSummary, None]:
        """Run attempts until one completes. Each continues the answer where the last one failed."""
        wants_prompt = call.sampling.prompt_logprobs is not None
        answer = AnswerAssembler(
            self._text.create_detokenizer(call.shown_tokens), call.stop, len(prompt) * wants_prompt
        )
        request = _Request(call, prompt, context, shared, shared_decode, answer)
        for number in itertools.count(1):
            num_before = len(answer.token_ids)
            context.trace.note_attempt_began(number, num_before)
            route = await self._next_route(request, number)
            context.trace.note_routed(route, self._config.routing.policy, self._table)
            assignment = Assignment(self._table, route)
            tracked = self._quarantine.track(request.suspicion, route)
            self._breakers.sent(route.addresses, self._clock())
            attempt = self._create_attempt(request, number, route, assignment, tracked)
            try:
                with closing(assignment):
                    async with aclosing(attempt.run(self._node_calls)) as pieces:
                        async for piece in pieces:
                            if isinstance(piece, TokenChunk):
                                self._quarantine.note_tokens(tracked, len(piece.token_ids))
                            yield piece
                self._breakers.succeeded(route.addresses)
                return
            except NodeFailed as failure:
                context.trace.note_attempt_failed()
                num_new = len(answer.token_ids) - num_before
                self._note_failure(request, attempt, tracked, failure, num_new)
                if number == MAX_TOTAL_ATTEMPTS or not self._may_retry(request.failures):
                    raise
            finally:
                self._quarantine.end(tracked)

    async def _next_route(self, request: _Request, number: int) -> Route:
        """Choose the nodes of an attempt. All attempts keep to the model revision of the first.

        Raises NoNodes and IncompatibleNodes.
        """
        route = (
            self._route_to_shared(request.shared_decode, request.prompt) if number == 1 else None
        )
        closed = self._quarantine.closed_addresses(request.suspicion)
        if route is None or route.decode.address in closed or request.suspicion.is_suspect:
            prior, revision = request.answer.token_ids, request.shared.revision
            call, count = request.call, next(self._numbers)
            ask = RoutingRequest(
                request.prompt, count, prior, call.model, call.cache_salt, revision
            )
            route = await self._choose_open_route(
                ask, request.failures.addresses, request.suspicion
            )
        request.shared.revision = route.decode.revision
        return route

    def _create_attempt(
        self,
        request: _Request,
        number: int,
        route: Route,
        assignment: Assignment,
        tracked: TrackedAttempt,
    ) -> Attempt:
        def note_prompt_done() -> None:
            assignment.note_prompt_done()
            if route.prefill is not None:
                self._quarantine.release_node(tracked, route.prefill.address)

        return Attempt(
            route=route,
            handoff_id=HandoffId(request.own_id, number),
            sequence=replace(
                _sequence(request.call, request.prompt, request.seed, request.answer.token_ids),
                age_s=max(0.0, self._clock() - request.context.received_s),
                is_paced=route.is_paced,
            ),
            answer=request.answer,
            context=request.context,
            clock=self._clock,
            on_prefilled=note_prompt_done,
            on_decoded=partial(request.shared.set_decode_node, route.decode),
        )

    def _note_failure(
        self,
        request: _Request,
        attempt: Attempt,
        tracked: TrackedAttempt,
        failure: NodeFailed,
        num_new_tokens: int,
    ) -> None:
        """Record a failed attempt with the request and the breakers. Raises PoisonedRequest."""
        is_drained = isinstance(failure, NodeDraining)
        verdict = self._judge(request, attempt, tracked, failure)
        # Engine failures need no retry limit here: the quarantine limits them for each request.
        is_ended = (
            verdict is not QuarantineVerdict.ORDINARY
            and failure.kind is not FailureKind.PASS_FAILED
        )
        is_free = is_drained or is_ended
        request.failures.note(attempt.failed_addresses, num_new_tokens, is_free=is_free)
        if not is_drained:
            self._breakers.failed(attempt.failed_addresses, self._clock())
        elif not request.answer.token_ids and request.context.shared is None:
            request.shared.revision = None  # the answer has no token yet

    def _judge(
        self, request: _Request, attempt: Attempt, tracked: TrackedAttempt, failure: NodeFailed
    ) -> QuarantineVerdict:
        """Return the quarantine's verdict on a failed attempt. Raises PoisonedRequest."""
        verdict = QuarantineVerdict.ORDINARY
        for address in attempt.failed_addresses:
            verdict = self._quarantine.judge(tracked, address, failure.kind)
            if verdict is not QuarantineVerdict.ORDINARY:
                request.context.trace.note_verdict(verdict.value, address)
        if verdict is QuarantineVerdict.POISON:
            raise PoisonedRequest(
                f"nodes fail when they run this request; it is not tried again, nor should it be "
                f"sent again before the cause is found. The last failure was: {failure}"
            ) from failure
        return verdict

    def _may_retry(self, failures: AttemptFailures) -> bool:
        """Return whether another attempt is allowed.

        Retries after progress, and those caused by draining or by an engine's end, do not count
        against the retry budget.
        """
        if failures.num >= self._config.max_attempts:
            return False
        return failures.is_paid or self._retry_budget.spend()

    async def _choose_open_route(
        self, ask: RoutingRequest, failed: frozenset[str], suspicion: Suspicion
    ) -> Route:
        """Choose nodes that the quarantine does not close to this request.

        Waits up to `quarantine_patience_s` for such nodes, then takes any. Raises what
        `_choose_route` raises.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.quarantine_patience_s
        while True:
            route = await self._choose_route(ask, failed)
            if suspicion.group.is_poisoned:
                raise PoisonedRequest("nodes fail when they run another answer to the same prompt")
            closed = self._quarantine.closed_addresses(suspicion)
            is_held = self._quarantine.is_group_tested(suspicion) or self._is_group_lost(suspicion)
            if loop.time() >= give_up_s or not (is_held or closed & set(route.addresses)):
                return route
            detour = None if is_held else self._route_around(ask, route, failed, closed)
            if detour is not None:
                return detour
            changed = self._nodes_changed
            with self._quarantine.waiting(suspicion, route), suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await changed.wait()

    def _is_group_lost(self, suspicion: Suspicion) -> bool:
        """Return whether another answer to its prompt is on a lost node and not judged yet."""
        addresses = self._quarantine.group_addresses(suspicion)
        return bool(addresses) and not addresses <= {node.address for node in self._table.nodes}

    def _route_around(
        self, ask: RoutingRequest, route: Route, failed: frozenset[str], closed: frozenset[str]
    ) -> Route | None:
        """Return a route around `closed` that has a prefill node if and only if `route` has one."""
        for without in (closed | failed, closed):
            with suppress(NoNodes, IncompatibleNodes):
                detour = choose(self._table, self._config.routing, ask, without=without)
                if (detour.prefill is None) == (route.prefill is None):
                    return detour
        return None

    async def _choose_route(self, ask: RoutingRequest, failed: frozenset[str]) -> Route:
        """Choose nodes, avoiding those that failed where possible.

        Raises NoNodes and IncompatibleNodes if there are none for `node_patience_s`.
        """
        avoided = self._breakers.avoided(self._clock())
        for without in dict.fromkeys(filter(None, (failed | avoided, failed))):
            with suppress(NoNodes, IncompatibleNodes):
                return choose(self._table, self._config.routing, ask, without=without)
        if failed:
            # A node that failed is better than none. Pause so that a lost one can leave the table.
            await asyncio.sleep(self._config.retry_pause_s)
        return await self._wait_for_route(partial(choose, self._table, self._config.routing, ask))

    def _route_to_shared(self, decode: Node | None, prompt: tuple[int, ...]) -> Route | None:
        """Return the route to the node that computed the same prompt, if it has room."""
        if decode is None or decode.card.prefix_naming is None:
            return None
        if decode not in self._table.open_nodes(NodeRole.DECODE):
            return None
        capacity = decode.card.max_num_seqs
        if capacity and self._table.node_load(decode).num_requests >= capacity:
            return None
        block_size = decode.card.fingerprint.block_size
        num_missing = 1 + (len(prompt) - 1) % block_size
        return Route(decode, None, "its prompt is there, for another answer", num_missing)

    async def _wait_for_route(self, choose_route: Callable[[], Route]) -> Route:
        """Repeat `choose_route` on table changes, such as for a node that restarts.

        Raises NoNodes or IncompatibleNodes after `node_patience_s`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.node_patience_s):
                while True:
                    changed = self._nodes_changed
                    with suppress(NoNodes, IncompatibleNodes):
                        return choose_route()
                    await changed.wait()
        return choose_route()

    @contextmanager
    def _reserve_id(self, request_id: str) -> Iterator[None]:
        if request_id in self._ids_in_use:
            raise RequestIdInUse(f"request id {request_id!r} is in use; choose another")
        self._ids_in_use.add(request_id)
        self._became_idle.clear()
        try:
            yield
        finally:
            self._ids_in_use.discard(request_id)
            if not self._ids_in_use:
                self._became_idle.set()


def _check_prompt_logprobs(
    call: GenerateCall, num_tokens: int, context: RequestContext, shared: SharedPrompt
) -> None:
    """Check the prompt logprobs of all answers to a prompt. Raises InvalidRequest."""
    count = call.sampling.prompt_logprobs
    budget = context.logprob_budget or LogprobBudget()
    budget.spend(num_tokens, count, shared.num_answers)
    check_prompt_logprobs_fit(num_tokens, count)


class _Request:
    """State of a request that is kept across its attempts."""

    def __init__(
        self,
        call: GenerateCall,
        prompt: tuple[int, ...],
        context: RequestContext,
        shared: SharedPrompt,
        shared_decode: Node | None,
        answer: AnswerAssembler,
    ) -> None:
        self.call = call
        self.prompt = prompt
        self.context = context
        self.shared = shared
        self.shared_decode = shared_decode  # the node that computed the prompt for another answer
        self.answer = answer
        seed = call.sampling.seed
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.failures = AttemptFailures()
        self.suspicion = Suspicion((context.shared or shared).group)
        # Unique across routers: clients choose request ids, and hand-offs of different requests
        # must not share an id.
        self.own_id = f"{call.request_id}.{secrets.token_hex(NONCE_BYTES)}"


@contextmanager
def _sharing(context: RequestContext) -> Iterator[tuple[SharedPrompt, bool]]:
    """Yield the state shared by all answers to the prompt, and whether this is the first."""
    shared = context.shared or SharedPrompt()
    with shared.first_answer() as is_first:
        yield shared, is_first


def _sequence(
    call: GenerateCall, prompt: tuple[int, ...], seed: int, prior: tuple[int, ...]
) -> Sequence:
    return Sequence(prompt, call.sampling, seed, prior, call.priority, call.cache_salt)
