"""`baton bench replay`: a recorded trace against a running router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.bench.interrupt import stop_on_interrupt
from baton.bench.replay.run import OnEnded, Replay, ReplayRun, replay
from baton.bench.replay.workload import PromptBuilder, Scaling
from baton.client import AsyncClient

Connect = Callable[[str], AsyncClient]


@dataclass(frozen=True, slots=True)
class ReplayBench:
    """Settings of the benchmark."""

    replay: Replay
    block_tokens: int | None = None  # None: lengths as recorded
    max_output_tokens: int | None = None
    seed: int = 0


def bench_router(
    what: ReplayBench, address: str, connect: Connect, on_ended: OnEnded = lambda _: None
) -> ReplayRun:
    """Replay the trace against a running router, until its end or Ctrl-C."""
    return asyncio.run(_measure(what, address, connect, on_ended))


async def _measure(
    what: ReplayBench, address: str, connect: Connect, on_ended: OnEnded
) -> ReplayRun:
    async with stop_on_interrupt() as stop, connect(address) as client:
        model = await client.model()
        recorded = what.replay.trace.block_tokens
        scaling = Scaling(
            recorded,
            recorded if what.block_tokens is None else what.block_tokens,
            what.max_output_tokens,
            model.max_sequence_len,
        )
        builder = PromptBuilder(scaling, model.vocab_size, what.seed)
        return await replay(client, what.replay, builder, stop=stop, on_ended=on_ended)
