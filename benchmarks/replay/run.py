"""Replay of a recorded trace against a running router, open loop: one task per request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.bench.client import Sample, send_one
from baton.bench.load import PlannedRequest
from baton.bench.running import Connect, OnProgress, run_until, stop_on_interrupt
from baton.client import AsyncClient
from benchmarks.replay.config import ReplayBench
from benchmarks.replay.prefix_tree import Holders, PrefixTree
from benchmarks.replay.sources import (
    holders_of,
    lost_by_reason,
    num_reused,
    tokens_by_source,
)
from benchmarks.replay.trace import ReplayTrace, TraceRequest
from benchmarks.replay.workload import PromptBuilder, ReplayPrompt, Scaling, Turn


@dataclass(slots=True)
class ReplayedRequest:
    session: str
    sample: Sample
    num_prompt_tokens: int
    num_cut_tokens: int
    num_ideal_tokens: int  # that an infinite cache would have had
    by_source: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)  # ideal tokens computed, by reason


@dataclass(slots=True)
class ReplayRun:
    """Requests that ended."""

    num_planned: int
    requests: list[ReplayedRequest] = field(default_factory=list)
    duration_s: float = 0.0
    num_distinct_tokens: int = 0  # in whole blocks of all prompts and answers
    is_cut_short: bool = False


def bench_router(
    what: ReplayBench,
    trace: ReplayTrace,
    address: str,
    connect: Connect,
    on_progress: OnProgress = lambda *_: None,
) -> ReplayRun:
    """Replay the trace against a running router, until its end or Ctrl-C.

    Requests that have not ended by then are not part of the run.
    """
    return asyncio.run(_measure(what, trace, address, connect, on_progress))


async def _measure(
    what: ReplayBench, trace: ReplayTrace, address: str, connect: Connect, on_progress: OnProgress
) -> ReplayRun:
    async with stop_on_interrupt() as stop, connect(address) as client:
        model = await client.model()
        scaling = Scaling(
            trace.block_tokens,
            trace.block_tokens if what.block_tokens is None else what.block_tokens,
            what.max_output_tokens,
            model.max_sequence_len,
        )
        builder = PromptBuilder(scaling, model.vocab_size, what.seed)
        replayer = _Replayer(client, what, trace, builder, on_progress)
        replayer.run.is_cut_short = await run_until(stop, replayer.send_all())
        return replayer.finish()


@dataclass(frozen=True, slots=True)
class _EndedTurn:
    turn: Turn
    ended_s: float


class _Replayer:
    def __init__(
        self,
        client: AsyncClient,
        what: ReplayBench,
        trace: ReplayTrace,
        builder: PromptBuilder,
        on_progress: OnProgress,
    ) -> None:
        self.run = ReplayRun(len(trace.requests))
        self._client = client
        self._what = what
        self._trace = trace
        self._builder = builder
        self._on_progress = on_progress
        self._free = asyncio.Semaphore(what.max_in_flight)
        self._tree = PrefixTree(what.block_size)
        self._last_turns: dict[str, asyncio.Task[_EndedTurn]] = {}  # by session
        self._began_s = time.perf_counter()

    def _since_start_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(self._trace.requests):
                at_s = request.at_s * self._what.time_scale
                await asyncio.sleep(max(0.0, at_s - self._since_start_s()))
                before = self._last_turns.get(request.session)
                task = group.create_task(self._send(number, request, at_s, before))
                if request.session:
                    self._last_turns[request.session] = task

    def finish(self) -> ReplayRun:
        self.run.duration_s = self._since_start_s()
        self.run.num_distinct_tokens = self._tree.num_blocks * self._what.block_size
        return self.run

    async def _send(
        self,
        number: int,
        request: TraceRequest,
        at_s: float,
        before: asyncio.Task[_EndedTurn] | None,
    ) -> _EndedTurn:
        """Send a request, after the previous turn of its session has ended."""
        previous = None if before is None else await before
        if previous is not None:
            at_s = max(at_s, previous.ended_s)
        continued = previous.turn if previous is not None and self._what.use_answers else None
        prompt = self._builder.build(number, request, continued)
        planned = PlannedRequest(
            number, at_s, prompt.token_ids, prompt.num_output_tokens, seed=number
        )
        async with self._free:
            found = self._tree.find(prompt.token_ids)
            self._tree.add(prompt.token_ids)
            sample = await send_one(self._client, planned, self._since_start_s)
        self._note_ended(request, prompt, sample, found)
        return _EndedTurn(Turn(request, prompt.token_ids, tuple(sample.token_ids)), sample.ended_s)

    def _note_ended(
        self, request: TraceRequest, prompt: ReplayPrompt, sample: Sample, found: list[Holders]
    ) -> None:
        block_size = self._what.block_size
        by_source: Mapping[str, int] = {}
        lost: Counter[str] = Counter()
        if sample.finish is not None and sample.error is None:
            # The KV of an answer's last token is never computed.
            computed = (*prompt.token_ids, *sample.token_ids[:-1])
            self._tree.add(computed, holders_of(sample.finish.served))
            by_source = tokens_by_source(sample.finish)
            lost = lost_by_reason(sample.finish, found, num_reused(by_source), block_size)
        ended = ReplayedRequest(
            request.session,
            sample,
            len(prompt.token_ids),
            prompt.num_cut_tokens,
            len(found) * block_size,
            by_source,
            lost,
        )
        self.run.requests.append(ended)
        self._on_progress(self._trace.format, len(self.run.requests), self.run.num_planned)
