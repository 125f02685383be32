"""All answers to the prompts of one client request (`n`), merged into one stream.

Each answer is a request of its own in the pipeline, which can fail, stop or migrate without the
others. The first answer to a prompt has it computed. The others wait until a decode node has its
KV, and go there: the node's prefix cache has all blocks of the prompt but the last, partial one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import FIELD
from baton.core.ids import ModelVariant
from baton.core.output import Finish, TokenLogprobs
from baton.core.request import EMBED, UNSAMPLED, EmbedTask
from baton.core.sampling import SamplingParams
from baton.router.dispatch.quarantine import PromptGroup
from baton.router.input_processing.limits import (
    LogprobBudget,
    check_count,
    check_hints,
    check_texts,
    check_total_size,
)
from baton.router.pipeline import Pipeline
from baton.router.request_scope import PromptPlacement, RequestContext, RequestScope
from baton.router.values import AnswerPart, GenerateCall, Prompt, TokenChunk

Parts = AsyncGenerator[AnswerPart, None]
IndexedParts = AsyncGenerator[tuple[int, AnswerPart], None]
Answer = AbstractAsyncContextManager[Parts]
NUM_SEEDS = 1 << 64
MAX_INPUTS = 2048  # as in OpenAI's API


async def generate_answers(
    pipeline: Pipeline,
    scope: RequestScope,
    calls: Sequence[GenerateCall],
    num_each: int,
) -> IndexedParts:
    """Yield the parts of the answers to all calls, each with the index of its call.

    Each `num_each` consecutive calls have the same prompt. The first call is answered in `scope`,
    the others in child scopes. If one answer fails, or the consumer stops early, all are cancelled.
    """
    if len(calls) == 1:
        with scope.answering(calls[0]) as call, pipeline.accept(call.request_id):
            async with aclosing(pipeline.generate(call, scope.context)) as parts:
                async for part in parts:
                    yield 0, part
        return
    scopes = [scope, *(scope.begin_child(call.request_id) for call in calls[1:])]
    budget = LogprobBudget(num_each)
    prompts = [SharedPrompt(pipeline, budget) for _ in range(0, len(calls), num_each)]
    answers = [
        prompts[place // num_each].answering(own, call, is_first=place % num_each == 0)
        for place, (own, call) in enumerate(zip(scopes, calls, strict=True))
    ]
    async for indexed in _merge(answers):
        yield indexed


class SharedPrompt:
    """The answers to one prompt: the first one has it computed, the others reuse its KV."""

    def __init__(self, pipeline: Pipeline, budget: LogprobBudget) -> None:
        self._pipeline = pipeline
        self._budget = budget
        self._group = PromptGroup()
        self._may_follow = asyncio.Event()  # the other answers need not wait for the first any more
        self._failure: Exception | None = None  # of the first answer
        self._placement: PromptPlacement | None = None
        self._logprobs: tuple[TokenLogprobs | None, ...] = ()  # known once the first one has them

    @asynccontextmanager
    async def answering(
        self,
        scope: RequestScope,
        call: GenerateCall,
        *,
        is_first: bool,
    ) -> AsyncIterator[Parts]:
        """Yield the parts of one answer, which ends with the block."""
        context = replace(scope.context, logprob_budget=self._budget, quarantine_group=self._group)
        wants_logprobs = call.sampling.prompt_logprobs is not None
        with (
            scope.answering(call) as salted,
            self._releasing_others(is_first=is_first),
            self._pipeline.accept(call.request_id, is_one_of_several=True),
        ):
            if is_first:
                context = replace(context, note_placement=self._note_placement)
                parts = self._pipeline.generate(salted, context)
            else:
                parts = self._pipeline.generate(*await self._follow(salted, context))
            if wants_logprobs:
                parts = self._with_prompt_logprobs(parts)
            async with aclosing(parts):
                yield parts

    @contextmanager
    def _releasing_others(self, *, is_first: bool) -> Iterator[None]:
        """Release the other answers at the end of the first one, however it ends."""
        try:
            yield
        except Exception as failure:
            if is_first:
                self._failure = failure
            raise
        finally:
            if is_first:
                self._may_follow.set()

    def _note_placement(self, placement: PromptPlacement) -> None:
        if not self._may_follow.is_set():
            self._placement = placement
            if placement.has_kv:
                self._may_follow.set()

    async def _follow(
        self, call: GenerateCall, context: RequestContext
    ) -> tuple[GenerateCall, RequestContext]:
        """Wait for the first answer's prompt, and return call and context of one that reuses it.

        Raises the error of the first answer if it failed: a request ends with the first failure.
        """
        await self._may_follow.wait()
        if self._failure is not None:
            raise self._failure
        if self._placement is None:
            return call, context
        sampling = replace(call.sampling, prompt_logprobs=None)
        placement = self._placement
        prompt, salt = placement.prompt, placement.cache_salt
        call = replace(call, prompt=prompt, sampling=sampling, cache_salt=salt)
        return call, replace(context, placement=placement)

    async def _with_prompt_logprobs(self, parts: Parts) -> Parts:
        """Add the prompt logprobs, which are computed only once, to the first part of an answer."""
        is_first = True
        async with aclosing(parts):
            async for part in parts:
                if is_first and isinstance(part, TokenChunk):
                    is_first = False
                    self._logprobs = part.prompt_logprobs or self._logprobs
                    yield part._replace(prompt_logprobs=self._logprobs)
                else:
                    yield part


async def _merge(answers: Sequence[Answer]) -> IndexedParts:
    # A queue of one: answers that are faster than the client wait, as with a single answer.
    queue: asyncio.Queue[tuple[int, AnswerPart | Exception]] = asyncio.Queue(1)

    async def forward(index: int, answer: Answer) -> None:
        try:
            async with answer as parts:
                async for part in parts:
                    await queue.put((index, part))
        except Exception as failure:  # noqa: BLE001 - raised again by the consumer
            await queue.put((index, failure))

    tasks = [asyncio.ensure_future(forward(*indexed)) for indexed in enumerate(answers)]
    try:
        num_ended = 0
        while num_ended < len(answers):
            index, part = await queue.get()
            if isinstance(part, Exception):
                raise part
            num_ended += isinstance(part, Finish)
            yield index, part
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def calls_for_answers(
    call: GenerateCall, prompts: Sequence[Prompt], num_each: int
) -> list[GenerateCall]:
    """Return `num_each` consecutive calls for each prompt, which differ from `call` in the seed.

    All APIs create their calls here. Raises InvalidRequest if these are too large together.
    """
    num_answers = num_each * len(prompts)
    check_total_size(call.sampling, call.bad_words, num_answers)
    check_hints(call.kv_hints, num_answers, call.sampling.prompt_logprobs)
    if call.foreign_kv is not None and call.kv_hints.prefetch:
        raise InvalidRequest(
            f"kv_hints.prefetch: no other request could use the KV of {FIELD}; leave out one of "
            "them",
            "kv_hints.prefetch",
        )
    if num_answers == 1:
        return [call]
    if call.foreign_kv is not None:
        raise InvalidRequest(
            f"{FIELD} is for one prompt and one answer, not for {num_answers}: set n to 1", FIELD
        )
    return [
        replace(
            call,
            request_id=f"{call.request_id}-{index}",
            prompt=prompts[index // num_each],
            sampling=_with_seed(call.sampling, index % num_each),
        )
        for index in range(num_answers)
    ]


def _with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of answer `index`. The first answer has the seed of the request."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % NUM_SEEDS)


def calls_for_texts(
    request_id: str,
    texts: Sequence[Prompt],
    model: ModelVariant,
    *,
    max_tokens: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    task: EmbedTask = EMBED,
) -> list[GenerateCall]:
    """Return a call for each text. All APIs create their calls here. Raises InvalidRequest.

    `max_tokens` cuts longer texts; None: they are refused if they exceed the context.
    """
    check_texts(model.name, cache_salt, (), ())
    check_count("input", len(texts), MAX_INPUTS)
    if not texts:
        raise InvalidRequest("input is empty: send at least one text", "input")
    if max_tokens is not None and max_tokens < 1:
        field = "truncate_prompt_tokens"
        raise InvalidRequest(f"{field} is {max_tokens}; it must be at least 1", field)
    call = GenerateCall(
        request_id,
        texts[0],
        UNSAMPLED,
        model=model,
        priority=priority,
        cache_salt=cache_salt,
        task=task,
        max_prompt_tokens=max_tokens,
    )
    if len(texts) == 1:
        return [call]
    return [
        replace(call, request_id=f"{request_id}-{index}", prompt=text)
        for index, text in enumerate(texts)
    ]
