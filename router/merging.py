"""Merges the answers to several calls into one stream of parts with call indices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from router.request_scope import Answering
from router.values import CompletionSummary, TokenChunk

IndexedParts = AsyncGenerator[tuple[int, TokenChunk | CompletionSummary], None]


async def merged(answers: Sequence[Answering]) -> IndexedParts:
    """Yield the parts of all answers until each has ended.

    If one answer fails, or the consumer stops early, all are cancelled.
    """
    if len(answers) > 1:
        async for indexed in _of_several(answers):
            yield indexed
        return
    async with answers[0] as parts:
        async for part in parts:
            yield 0, part


async def _of_several(answers: Sequence[Answering]) -> IndexedParts:
    # A queue of one: answers that are faster than the client wait, as with a single answer.
    queue: asyncio.Queue[tuple[int, TokenChunk | CompletionSummary | Exception]] = asyncio.Queue(1)

    async def forward(index: int, answer: Answering) -> None:
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
            num_ended += isinstance(part, CompletionSummary)
            yield index, part
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
