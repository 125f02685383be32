"""One request's way through the router: admit, tokenise, choose, dispatch, put together."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from baton.spelling import TokenText
from kv_transfer.types import HandoffId
from router.admission import Admission
from router.answer import Answer
from router.answer_forecast import AnswerForecast
from router.assignment import Assignment
from router.attempt import Attempt
from router.breakers import BreakerConfig, Breakers
from router.context import RequestContext
from router.failures import Failures
from router.forecast import Forecast
from router.form_checks import NODES_WILL_TELL, FormChecks
from router.large_texts import LargeTextConfig, LargeTexts
from router.legs import NodeCalls
from router.line import FIRST_ROOM, LineConfig
from router.nodes import Node, NodeTable
from router.policy import Ask, Route, Routing, choose
from router.quarantine import Boarding, Quarantine, Suspicion, Verdict
from router.retry_budget import RetryBudget
from router.shared_prompt import SharedPrompt
from router.sizes import LogprobBudget, check_prompt_logprobs_fit
from router.text import TextBoundary
from router.values import Call, Ending, Piece, Prompt
from serving.errors import (
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
from serving.node import NodeRole
from serving.translate_sequence import Sequence

SEED_BITS = 63
NONCE_BYTES = 8
MARGIN = 1.25  # urgent requests pass those in line, and no forecast is exact
# When all nodes are replaced at once, many refuse before the router hears that they drain.
MOST_TRIES = 50
MAX_REMEMBERED_BAD_WORDS = 16


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    max_attempts: int = 3  # that bring no token, in a row
    node_patience_s: float = 0.0  # how long a request waits for a decode node to be there
    quarantine_patience_s: float = 10.0  # and for one that others' tests keep it from
    retry_pause_s: float = 0.2  # before a node that has just failed is asked again
    routing: Routing = field(default_factory=Routing)
    breakers: BreakerConfig = field(default_factory=BreakerConfig)
    line: LineConfig = field(default_factory=LineConfig)
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
        forms: FormChecks = NODES_WILL_TELL,
    ) -> None:
        self._table = table
        self._node_calls = node_calls
        self._text = text
        # All answers of a request have the same words, and look them up at the same moment.
        self._spellings = lru_cache(MAX_REMEMBERED_BAD_WORDS)(self._all_spellings)
        self._forms = forms
        self._large_texts = LargeTexts(config.large_texts)
        self._clock = clock
        self._config = config
        self._numbers = itertools.count()
        self._admission = Admission(config.line, clock)
        self._forecast = Forecast()
        self._answers = AnswerForecast()
        self._breakers = Breakers(config.breakers)
        self._quarantine = Quarantine(self._wake)
        self._retry_budget = RetryBudget(config.line.max_in_flight or FIRST_ROOM)
        self._ids_in_use: set[str] = set()
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self._nodes_changed = asyncio.Event()
        self.is_draining = False

    def nodes_changed(self) -> None:
        """The table has news for those that wait for a node, or for room on one."""
        self._admission.resize(self._table.num_run_at_once)
        self._wake()

    def _wake(self) -> None:
        """Those that wait for a node look again."""
        self._nodes_changed.set()
        self._nodes_changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._admission.num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._admission.num_in_flight

    async def drain(self) -> None:
        """Take nothing new; returns when every request under way has ended."""
        self.is_draining = True
        await self._became_idle.wait()

    async def generate(
        self, call: Call, context: RequestContext
    ) -> AsyncGenerator[Piece | Ending, None]:
        """The answer, piece by piece, and how it ended. Left early, every node stops."""
        if self.is_draining:
            raise Draining("this router is on its way out; send the request to another")
        self.check_model(call.model)
        with self._id_held(call.request_id), _shared(context) as (shared, leads):
            beside = None if leads else await shared.decode_node()
            call = self._without_bad_words(call)
            prompt = await self._prompt(call, context, shared)
            call = self._within_context(call, len(prompt))
            if leads:
                _check_prompt_logprobs(call, len(prompt), context, shared)
            await self._forms.check(call.sampling.structured_outputs)
            tries = self._tries_sharing(call, prompt, context, shared, beside)
            with self._awaiting(call, context) as began:
                async with self._admission.turn(call.priority), aclosing(tries) as pieces:
                    # It may have waited for longer than was foreseen: nodes shall not work in vain.
                    self._refuse_if_too_late(call, context, 0.0, self.num_in_flight - 1)
                    context.trace.admitted()
                    with self._paced() as given:
                        async for piece in pieces:
                            began()
                            given(piece)
                            yield piece

    def check_model(self, model: str) -> None:
        """Raises UnknownModel."""
        served = self._table.models
        if model and served and model not in served:
            names = ", ".join(sorted(served))
            raise UnknownModel(f"model {model!r} is not served here; served: {names}")

    async def token_ids(self, prompt: Prompt, model: str = "") -> tuple[int, ...]:
        """Raises InvalidRequest for more text than the model could take."""
        read = partial(self._text.token_ids, prompt, self._table.max_model_len(model))
        return await self._large_texts.read(prompt.num_characters, read)

    async def spelled(self, token_ids: tuple[int, ...]) -> str:
        """Their text."""
        return await self._large_texts.read(len(token_ids), partial(self._text.text, token_ids))

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template shows tools to it."""
        return self._text.shows_tools

    def token(self, token_id: int) -> TokenText:
        """One token by itself, for those who ask how likely it was."""
        return self._text.token(token_id)

    async def _prompt(
        self, call: Call, context: RequestContext, shared: SharedPrompt
    ) -> tuple[int, ...]:
        """Token ids of the prompt, tokenised once for all answers to it. Raises EmptyPrompt."""
        prompt = shared.token_ids or await self.token_ids(call.prompt, call.model)
        shared.token_ids = prompt
        context.trace.tokenized(len(prompt), self._admission.num_waiting)
        if not prompt:
            raise EmptyPrompt("the prompt has no tokens; there is nothing to continue")
        return prompt

    def _within_context(self, call: Call, num_prompt_tokens: int) -> Call:
        """With a default max_tokens that the KV cache of every decode node can hold."""
        longest = self._table.max_sequence_len(call.model)
        if not call.fills_context or longest is None:
            return call
        least = max(1, call.sampling.min_tokens)
        max_tokens = max(least, longest - num_prompt_tokens)
        if max_tokens >= call.sampling.max_tokens:
            return call
        return replace(call, sampling=replace(call.sampling, max_tokens=max_tokens))

    def _without_bad_words(self, call: Call) -> Call:
        """Nodes know no text: they are told the tokens."""
        if not call.bad_words:
            return call
        banned = (*call.sampling.banned_sequences, *self._spellings(call.bad_words))
        return replace(call, sampling=replace(call.sampling, banned_sequences=banned))

    def _all_spellings(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        spelled = {tokens for word in words for tokens in self._text.spellings(word)}
        return tuple(sorted(spelled))

    @contextmanager
    def _awaiting(self, call: Call, context: RequestContext) -> Iterator[Callable[[], None]]:
        """Yields what is called when its answer has begun. Raises TooLate."""
        wait_s = self._forecast.wait_s(call.priority)
        self._refuse_if_too_late(call, context, wait_s, self.num_in_flight)
        priority = call.priority
        self._forecast.came(priority, self._clock())
        self._retry_budget.request_came()
        has_begun = False

        def began() -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self._forecast.began(priority, self._clock())

        try:
            yield began
        finally:
            if not has_begun:
                self._forecast.left(priority)

    @contextmanager
    def _paced(self) -> Iterator[Callable[[Piece | Ending], None]]:
        """Yields what is called with each part of an answer: the next ones will take as long."""
        began_s = last_s = self._clock()
        num_tokens, is_whole = 0, False

        def given(part: Piece | Ending) -> None:
            nonlocal last_s, num_tokens, is_whole
            if isinstance(part, Ending):
                is_whole = True
            elif part.token_ids:
                last_s = self._clock()
                num_tokens += len(part.token_ids)

        try:
            yield given
        finally:
            lasted_s = last_s - began_s
            self._answers.given(num_tokens, lasted_s, self.num_in_flight, is_whole=is_whole)

    def _refuse_if_too_late(
        self, call: Call, context: RequestContext, wait_s: float, num_others: int
    ) -> None:
        """At once, while its client can still go elsewhere. It waits so long for its turn."""
        remaining_s = context.remaining_s(self._clock())
        if remaining_s is None:
            return
        lasts_s = self._answers.lasts_s(call.sampling.max_tokens, num_others)
        if MARGIN * (wait_s + lasts_s) > remaining_s:
            raise TooLate(
                f"its turn would come in about {wait_s:.1f} s and the answer take {lasts_s:.1f} s, "
                f"with {MARGIN - 1:.0%} in reserve, but the client waits for {remaining_s:.1f} s",
                MARGIN * (wait_s + lasts_s) - remaining_s,
            )

    def _tries_sharing(
        self,
        call: Call,
        prompt: tuple[int, ...],
        context: RequestContext,
        shared: SharedPrompt,
        beside: Node | None,
    ) -> AsyncGenerator[Piece | Ending, None]:
        """The tries of one answer, with prompt logprobs that another answer has already."""
        if call.sampling.prompt_logprobs is None:
            return self._tries(call, prompt, context, shared, beside)
        if shared.prompt_logprobs:
            call = replace(call, sampling=replace(call.sampling, prompt_logprobs=None))
        tries = self._tries(call, prompt, context, shared, beside)
        return shared.with_prompt_logprobs(tries)

    async def _tries(
        self,
        call: Call,
        prompt: tuple[int, ...],
        context: RequestContext,
        shared: SharedPrompt,
        beside: Node | None,
    ) -> AsyncGenerator[Piece | Ending, None]:
        """Try until one comes to its end; the answer goes on where the last try broke off."""
        wants_prompt = call.sampling.prompt_logprobs is not None
        answer = Answer(
            self._text.speller(call.shown_tokens), call.stop, len(prompt) * wants_prompt
        )
        one = _Request(call, prompt, context, shared, beside, answer)
        for number in itertools.count(1):
            num_given = len(answer.token_ids)
            context.trace.try_began(number, num_given)
            route = await self._next_route(one, number)
            context.trace.routed(route, self._config.routing.policy, self._table)
            assignment = Assignment(self._table, route)
            boarding = self._quarantine.board(one.suspicion, route)
            self._breakers.sent(route.addresses, self._clock())
            attempt = self._attempt(one, number, route, assignment, boarding)
            try:
                with closing(assignment):
                    async with aclosing(attempt.run(self._node_calls)) as pieces:
                        async for piece in pieces:
                            if isinstance(piece, Piece):
                                self._quarantine.gave(boarding, len(piece.token_ids))
                            yield piece
                self._breakers.succeeded(route.addresses)
                return
            except NodeFailed as failure:
                context.trace.try_failed()
                num_new = len(answer.token_ids) - num_given
                self._note_failure(one, attempt, boarding, failure, num_new)
                if number == MOST_TRIES or not self._may_go_on(one.failures):
                    raise
            finally:
                self._quarantine.close(boarding)

    async def _next_route(self, one: _Request, number: int) -> Route:
        """Raises NoNodes and IncompatibleNodes. All tries keep to the revision of the first."""
        route = self._route_beside(one.beside, one.prompt) if number == 1 else None
        closed = self._quarantine.closed_to(one.suspicion)
        if route is None or route.decode.address in closed or one.suspicion.is_suspect:
            given, revision = one.answer.token_ids, one.shared.revision
            call, count = one.call, next(self._numbers)
            ask = Ask(one.prompt, count, given, call.model, call.cache_salt, revision)
            route = await self._open_route(ask, one.failures.addresses, one.suspicion)
        one.shared.revision = route.decode.revision
        return route

    def _attempt(
        self,
        one: _Request,
        number: int,
        route: Route,
        assignment: Assignment,
        boarding: Boarding,
    ) -> Attempt:
        def prompt_done() -> None:
            assignment.prompt_done()
            if route.prefill is not None:
                self._quarantine.leave(boarding, route.prefill.address)

        return Attempt(
            route=route,
            handoff_id=HandoffId(one.own_id, number),
            sequence=replace(
                _sequence(one.call, one.prompt, one.seed, one.answer.token_ids),
                age_s=max(0.0, self._clock() - one.context.received_s),
                is_paced=route.is_paced,
            ),
            answer=one.answer,
            context=one.context,
            clock=self._clock,
            on_prefilled=prompt_done,
            on_decoded=partial(one.shared.is_at, route.decode),
        )

    def _note_failure(
        self,
        one: _Request,
        attempt: Attempt,
        boarding: Boarding,
        failure: NodeFailed,
        num_new_tokens: int,
    ) -> None:
        """Raises PoisonedRequest."""
        is_drained = isinstance(failure, NodeDraining)
        verdict = self._judged(one, attempt, boarding, failure)
        # Engines that end are bounded by themselves: each ends the request that ended it.
        is_ended = verdict is not Verdict.ORDINARY and failure.kind is not FailureKind.PASS_FAILED
        is_free = is_drained or is_ended
        one.failures.note(attempt.failed_addresses, num_new_tokens, is_free=is_free)
        if not is_drained:
            self._breakers.failed(attempt.failed_addresses, self._clock())
        elif not one.answer.token_ids and one.context.shared is None:
            one.shared.revision = None  # nothing of the answer was begun

    def _judged(
        self, one: _Request, attempt: Attempt, boarding: Boarding, failure: NodeFailed
    ) -> Verdict:
        """Raises PoisonedRequest."""
        verdict = Verdict.ORDINARY
        for address in attempt.failed_addresses:
            verdict = self._quarantine.failed(boarding, address, failure.kind)
            if verdict is not Verdict.ORDINARY:
                one.context.trace.judged(verdict.value, address)
        if verdict is Verdict.POISON:
            raise PoisonedRequest(
                f"nodes fail when they run this request; it is not tried again, nor should it be "
                f"sent again before the cause is found. The last failure was: {failure}"
            ) from failure
        return verdict

    def _may_go_on(self, failures: Failures) -> bool:
        """What brought the answer on is paid for, and what drains costs nothing."""
        if failures.num >= self._config.max_attempts:
            return False
        return failures.is_paid or self._retry_budget.spend()

    async def _open_route(self, ask: Ask, failed: frozenset[str], suspicion: Suspicion) -> Route:
        """To nodes that are not closed to it for a test; it waits for them, but not for ever.

        Raises as `_route` does.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.quarantine_patience_s
        while True:
            route = await self._route(ask, failed)
            if suspicion.kin.is_poisoned:
                raise PoisonedRequest("nodes fail when they run another answer to the same prompt")
            closed = self._quarantine.closed_to(suspicion)
            is_held = self._quarantine.is_kin_tested(suspicion) or self._is_kin_lost(suspicion)
            if loop.time() >= give_up_s or not (is_held or closed & set(route.addresses)):
                return route
            other = None if is_held else self._route_around(ask, route, failed, closed)
            if other is not None:
                return other
            changed = self._nodes_changed
            with self._quarantine.waiting(suspicion, route), suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await changed.wait()

    def _is_kin_lost(self, suspicion: Suspicion) -> bool:
        """Whether another answer to its prompt is on a node that is gone, and not judged yet."""
        addresses = self._quarantine.kin_addresses(suspicion)
        return bool(addresses) and not addresses <= {node.address for node in self._table.nodes}

    def _route_around(
        self, ask: Ask, route: Route, failed: frozenset[str], closed: frozenset[str]
    ) -> Route | None:
        """Another one as good: the prompt goes to a prefill node if it would without `closed`."""
        for without in (closed | failed, closed):
            with suppress(NoNodes, IncompatibleNodes):
                other = choose(self._table, self._config.routing, ask, without=without)
                if (other.prefill is None) == (route.prefill is None):
                    return other
        return None

    async def _route(self, ask: Ask, failed: frozenset[str]) -> Route:
        """Raises NoNodes and IncompatibleNodes when none that fits has come for a while."""
        avoided = self._breakers.avoided(self._clock())
        for without in dict.fromkeys(filter(None, (failed | avoided, failed))):
            with suppress(NoNodes, IncompatibleNodes):
                return choose(self._table, self._config.routing, ask, without=without)
        if failed:
            # A node that failed once is better than none, unless it is found to be gone.
            await asyncio.sleep(self._config.retry_pause_s)
        return await self._patiently(partial(choose, self._table, self._config.routing, ask))

    def _route_beside(self, decode: Node | None, prompt: tuple[int, ...]) -> Route | None:
        """To the node that has the prompt of another answer, if it can take one more."""
        if decode is None or decode.card.prefix_naming is None:
            return None
        if decode not in self._table.open_nodes(NodeRole.DECODE):
            return None
        room = decode.card.max_num_seqs
        if room and self._table.burden(decode).num_requests >= room:
            return None
        block_size = decode.card.fingerprint.block_size
        num_missing = 1 + (len(prompt) - 1) % block_size
        return Route(decode, None, "its prompt is there, for another answer", num_missing)

    async def _patiently(self, choose_one: Callable[[], Route]) -> Route:
        """A node that restarts is back in a moment.

        Raises NoNodes or IncompatibleNodes when it is not.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.node_patience_s):
                while True:
                    changed = self._nodes_changed
                    with suppress(NoNodes, IncompatibleNodes):
                        return choose_one()
                    await changed.wait()
        return choose_one()

    @contextmanager
    def _id_held(self, request_id: str) -> Iterator[None]:
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
    call: Call, num_tokens: int, context: RequestContext, shared: SharedPrompt
) -> None:
    """For all answers to a prompt. Raises InvalidRequest."""
    count = call.sampling.prompt_logprobs
    budget = context.logprob_budget or LogprobBudget()
    budget.spend(num_tokens, count, shared.num_answers)
    check_prompt_logprobs_fit(num_tokens, count)


class _Request:
    """What stays of a request from one try to the next."""

    def __init__(
        self,
        call: Call,
        prompt: tuple[int, ...],
        context: RequestContext,
        shared: SharedPrompt,
        beside: Node | None,
        answer: Answer,
    ) -> None:
        self.call = call
        self.prompt = prompt
        self.context = context
        self.shared = shared
        self.beside = beside  # the node that has the prompt, for another answer
        self.answer = answer
        seed = call.sampling.seed
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.failures = Failures()
        self.suspicion = Suspicion((context.shared or shared).kin)
        # Clients choose ids, and other routers have other clients: what nodes hand over under one
        # must not meet what they were asked for under the same one.
        self.own_id = f"{call.request_id}.{secrets.token_hex(NONCE_BYTES)}"


@contextmanager
def _shared(context: RequestContext) -> Iterator[tuple[SharedPrompt, bool]]:
    """What it has in common with other answers, and whether it is the first of them."""
    shared = context.shared or SharedPrompt()
    with shared.led() as leads:
        yield shared, leads


def _sequence(call: Call, prompt: tuple[int, ...], seed: int, given: tuple[int, ...]) -> Sequence:
    return Sequence(prompt, call.sampling, seed, given, call.priority, call.cache_salt)
