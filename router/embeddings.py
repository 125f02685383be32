"""Vectors of all texts of one client request. Each text is a request of its own in the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from baton.core.output import Finish
from baton.core.request import TaskOutput
from baton.core.vectors import Floats, decode_vector
from baton.router.input_processing.limits import check_token_vectors_fit
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScope
from baton.router.values import GenerateCall, TokenChunk

# Texts of one request that are in the pipeline at once: the others leave places in the admission
# queue to other clients.
MAX_IN_PIPELINE = 64


class EmbeddedText(NamedTuple):
    vector: Floats  # or those of its tokens, [tokens, size]
    num_tokens: int
    warnings: tuple[str, ...]  # what was done only in part


async def embed_texts(
    pipeline: Pipeline,
    scope: RequestScope,
    calls: Sequence[GenerateCall],
    hold: Callable[[int], None],
) -> list[EmbeddedText]:
    """Return the vectors of the texts, in order.

    The first text is embedded in `scope`, the others in child scopes. If one fails, all are
    cancelled. `hold` counts the bytes of vectors of tokens; InvalidRequest is raised if they are
    too many.
    """
    results: dict[int, EmbeddedText] = {}
    num_tokens = 0
    waiting = iter(enumerate(calls))
    num_tasks = min(len(calls), MAX_IN_PIPELINE)
    is_one_of_several = len(calls) > 1

    async def work() -> None:
        for index, call in waiting:
            own = scope.begin_child(call.request_id) if index else scope
            found = await _embed(pipeline, own, call, is_one_of_several=is_one_of_several)
            if found.vector.ndim == 2:
                nonlocal num_tokens
                num_tokens += found.num_tokens
                check_token_vectors_fit(num_tokens, found.vector.shape[1])
                hold(found.vector.nbytes)
            results[index] = found

    tasks = [asyncio.ensure_future(work()) for _ in range(num_tasks)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[index] for index in range(len(calls))]


async def _embed(
    pipeline: Pipeline, scope: RequestScope, call: GenerateCall, *, is_one_of_several: bool
) -> EmbeddedText:
    vector, num_tokens = b"", 0
    warnings: tuple[str, ...] = ()
    with (
        scope.answering(call) as salted,
        pipeline.accept(call.request_id, is_one_of_several=is_one_of_several),
    ):
        async with aclosing(pipeline.generate(salted, scope.context)) as parts:
            async for part in parts:
                if isinstance(part, TokenChunk):
                    vector = part.vector or vector
                elif isinstance(part, Finish):
                    num_tokens = part.num_prompt_tokens
                    warnings = part.warnings
    vectors = decode_vector(vector)
    if call.task.output is TaskOutput.VECTORS:
        vectors = vectors.reshape(num_tokens, -1)
    return EmbeddedText(vectors, num_tokens, warnings)
