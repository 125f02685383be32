"""One request's way through the router: admit, tokenise, choose, dispatch, put together."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from kv_transfer.types import HandoffId
from router.admission import Admission
from router.answer import Answer
from router.assignment import Assignment
from router.attempt import Attempt
from router.context import RequestContext
from router.legs import NodeCalls
from router.line import LineConfig
from router.nodes import NodeTable
from router.policy import Ask, Route, Routing, choose
from router.sizes import check_prompt_logprobs_fit
from router.text import TextBoundary
from router.values import Call, Ending, Piece
from serving.errors import (
    Draining,
    EmptyPrompt,
    NodeDraining,
    NodeFailed,
    NoNodes,
    RequestIdInUse,
    UnknownModel,
)
from serving.translate_sequence import Sequence

SEED_BITS = 63
# When all nodes are replaced at once, many refuse before the router hears that they drain.
MOST_TRIES = 50


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    max_attempts: int = 3
    node_patience_s: float = 0.0  # how long a request waits for a decode node to be there
    retry_pause_s: float = 0.2  # before a node that has just failed is asked again
    routing: Routing = field(default_factory=Routing)
    line: LineConfig = field(default_factory=LineConfig)


class Pipeline:
    def __init__(
        self,
        *,
        table: NodeTable,
        node_calls: NodeCalls,
        text: TextBoundary,
        clock: Callable[[], float],
        config: PipelineConfig,
    ) -> None:
        self._table = table
        self._node_calls = node_calls
        self.text = text
        self._clock = clock
        self._config = config
        self._numbers = itertools.count()
        self._admission = Admission(config.line, clock)
        self._ids_in_use: set[str] = set()
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self._nodes_changed = asyncio.Event()
        self.is_draining = False

    def nodes_changed(self) -> None:
        """The table has news for those that wait for a node."""
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
        self._check_model(call.model)
        prompt = self.text.token_ids(call.prompt)
        context.trace.tokenized(len(prompt), self._admission.num_waiting)
        if not prompt:
            raise EmptyPrompt("the prompt has no tokens; there is nothing to continue")
        check_prompt_logprobs_fit(len(prompt), call.sampling.prompt_logprobs)
        with self._id_held(call.request_id):
            async with (
                self._admission.turn(call.priority),
                aclosing(self._tries(call, prompt, context)) as pieces,
            ):
                context.trace.admitted()
                async for piece in pieces:
                    yield piece

    async def _tries(
        self, call: Call, prompt: tuple[int, ...], context: RequestContext
    ) -> AsyncGenerator[Piece | Ending, None]:
        """Try until one comes to its end; the answer goes on where the last try broke off."""
        answer = Answer(self.text.speller(), call.stop)
        seed = call.sampling.seed
        seed = secrets.randbits(SEED_BITS) if seed is None else seed
        failed: frozenset[str] = frozenset()
        num_failures = 0
        for number in itertools.count(1):
            context.trace.try_began(number, len(answer.token_ids))
            route = await self._route(call, prompt, answer.token_ids, failed)
            context.trace.routed(route, self._config.routing.policy, self._table)
            assignment = Assignment(self._table, route)
            attempt = Attempt(
                route=route,
                handoff_id=HandoffId(call.request_id, number),
                sequence=_sequence(call, prompt, seed, answer.token_ids),
                answer=answer,
                context=context,
                clock=self._clock,
                on_prefilled=assignment.prompt_done,
            )
            try:
                with closing(assignment):
                    async with aclosing(attempt.run(self._node_calls)) as pieces:
                        async for piece in pieces:
                            yield piece
                return
            except NodeFailed as failure:
                context.trace.try_failed()
                failed |= attempt.failed_addresses
                num_failures += not isinstance(failure, NodeDraining)  # which cost nothing
                if num_failures == self._config.max_attempts or number == MOST_TRIES:
                    raise

    async def _route(
        self,
        call: Call,
        prompt: tuple[int, ...],
        given: tuple[int, ...],
        failed: frozenset[str],
    ) -> Route:
        """Raises NoNodes when none has come for a while, and IncompatibleNodes."""
        ask = Ask(prompt, next(self._numbers), given, call.model, call.cache_salt)
        if failed:
            with suppress(NoNodes):
                return choose(self._table, self._config.routing, ask, without=failed)
            # A node that failed once is better than none, unless it is found to be gone.
            await asyncio.sleep(self._config.retry_pause_s)
        return await self._patiently(partial(choose, self._table, self._config.routing, ask))

    async def _patiently(self, choose_one: Callable[[], Route]) -> Route:
        """A node that restarts is back in a moment. Raises NoNodes when it is not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.node_patience_s):
                while True:
                    changed = self._nodes_changed
                    with suppress(NoNodes):
                        return choose_one()
                    await changed.wait()
        return choose_one()

    def _check_model(self, model: str) -> None:
        served = self._table.models
        if model and served and model not in served:
            names = ", ".join(sorted(served))
            raise UnknownModel(f"model {model!r} is not served here; served: {names}")

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


def _sequence(call: Call, prompt: tuple[int, ...], seed: int, given: tuple[int, ...]) -> Sequence:
    return Sequence(prompt, call.sampling, seed, given, call.priority, call.cache_salt)
