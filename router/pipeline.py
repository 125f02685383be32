"""Path of a request through the router: tokenise, admit, route, dispatch, assemble the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from router.admission.admission import AdmissionGate
from router.admission.admission_queue import INITIAL_CAPACITY, AdmissionQueueConfig
from router.admission.answer_forecast import AnswerForecast
from router.admission.retry_budget import RetryBudget
from router.admission.wait_forecast import FirstTokenForecast
from router.context import RequestContext
from router.dispatch.config import DispatchConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.node_rpcs import NodeCalls
from router.input_processing.form_checks import NO_FORM_CHECKS, FormChecks
from router.input_processing.large_texts import LargeTextConfig, LargeTexts
from router.input_processing.logprob_limits import LogprobBudget, check_prompt_logprobs_fit
from router.input_processing.tokenization import TextBoundary
from router.routing.node_table import Node, NodeTable
from router.shared_prompt import SharedPrompt
from router.values import CompletionSummary, GenerateCall, Prompt, TokenChunk
from rpc.errors import Draining, EmptyPrompt, RequestIdInUse, TooLate, UnknownModel
from text.token_text import TokenText

MARGIN = 1.25  # forecasts are inexact, and requests of a higher priority overtake
MAX_REMEMBERED_BAD_WORDS = 16


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    admission_queue: AdmissionQueueConfig = field(default_factory=AdmissionQueueConfig)
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
        self._text = text
        # All answers of a request look up the same words at the same time.
        self._spellings = lru_cache(MAX_REMEMBERED_BAD_WORDS)(self._compute_spellings)
        self._forms = forms
        self._large_texts = LargeTexts(config.large_texts)
        self._clock = clock
        self._admission = AdmissionGate(config.admission_queue, clock)
        self._forecast = FirstTokenForecast()
        self._answer_forecast = AnswerForecast()
        self._retry_budget = RetryBudget(config.admission_queue.max_in_flight or INITIAL_CAPACITY)
        self._dispatcher = Dispatcher(
            table=table,
            node_calls=node_calls,
            text=text,
            retry_budget=self._retry_budget,
            clock=clock,
            config=config.dispatch,
        )
        self._ids_in_use: set[str] = set()
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self.is_draining = False

    def handle_nodes_changed(self) -> None:
        """Handle a change of the table: admit up to the new capacity, wake waiting requests."""
        self._admission.resize(self._table.num_batch_slots)
        self._dispatcher.wake()

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
            return self._dispatcher.run(call, prompt, context, shared, shared_decode)
        if shared.prompt_logprobs:
            call = replace(call, sampling=replace(call.sampling, prompt_logprobs=None))
        attempts = self._dispatcher.run(call, prompt, context, shared, shared_decode)
        return shared.with_prompt_logprobs(attempts)

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


@contextmanager
def _sharing(context: RequestContext) -> Iterator[tuple[SharedPrompt, bool]]:
    """Yield the state shared by all answers to the prompt, and whether this is the first."""
    shared = context.shared or SharedPrompt()
    with shared.first_answer() as is_first:
        yield shared, is_first
