"""The answers to several calls as one stream of parts, each with the index of its call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from router.values import Ending, Piece
from router.visits import Answering

IndexedParts = AsyncGenerator[tuple[int, Piece | Ending], None]


async def merged(answers: Sequence[Answering]) -> IndexedParts:
    """Until each has ended. One that fails ends them all; left early, all are left."""
    if len(answers) > 1:
        async for indexed in _of_several(answers):
            yield indexed
        return
    async with answers[0] as parts:
        async for part in parts:
            yield 0, part


async def _of_several(answers: Sequence[Answering]) -> IndexedParts:
    # One place: whoever is ahead of the client waits, as with a single answer.
    told: asyncio.Queue[tuple[int, Piece | Ending | Exception]] = asyncio.Queue(1)

    async def tell(index: int, answer: Answering) -> None:
        try:
            async with answer as parts:
                async for part in parts:
                    await told.put((index, part))
        except Exception as failure:  # noqa: BLE001 - raised where the answers are read
            await told.put((index, failure))

    telling = [asyncio.ensure_future(tell(*each)) for each in enumerate(answers)]
    try:
        num_ended = 0
        while num_ended < len(answers):
            index, part = await told.get()
            if isinstance(part, Exception):
                raise part
            num_ended += isinstance(part, Ending)
            yield index, part
        await asyncio.gather(*telling)
    finally:
        for each in telling:
            each.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
