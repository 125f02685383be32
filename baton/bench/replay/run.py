"""Replay of a trace against a router, open loop: one task per request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.bench.replay.prefix_tree import Holders, PrefixTree
from baton.bench.replay.sources import (
    holders_of,
    lost_by_reason,
    num_reused,
    tokens_by_source,
)
from baton.bench.replay.trace import Trace, TraceRequest
from baton.bench.replay.workload import PromptBuilder, ReplayPrompt, Turn
from baton.bench.serve.client import Sample, send_one
from baton.bench.serve.load import PlannedRequest
from baton.client import AsyncClient


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace and how it is replayed."""

    trace: Trace
    time_scale: float = 1.0  # 0.1: ten times as fast
    use_answers: bool = False
    max_in_flight: int = 1000
    block_size: int = 16  # of the nodes' KV caches


@dataclass(slots=True)
class ReplayedRequest:
    """One request after its end."""

    session: str
    sample: Sample
    num_prompt_tokens: int
    num_cut_tokens: int  # that the model could not take
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


OnEnded = Callable[[ReplayedRequest], None]


async def replay(
    client: AsyncClient,
    what: Replay,
    builder: PromptBuilder,
    *,
    stop: asyncio.Event | None = None,
    on_ended: OnEnded = lambda _: None,
) -> ReplayRun:
    """Replay a trace. Requests unfinished when `stop` is set are not part of the run."""
    replayer = _Replayer(client, what, builder, on_ended)
    sending = asyncio.ensure_future(replayer.send_all())
    stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
    await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
    replayer.run.is_cut_short = not sending.done()
    for task in (sending, stopping):
        task.cancel()
    ended = await asyncio.gather(sending, stopping, return_exceptions=True)
    if isinstance(ended[0], Exception):
        raise ended[0]
    replayer.finish()
    return replayer.run


@dataclass(frozen=True, slots=True)
class _EndedTurn:
    turn: Turn
    ended_s: float


class _Replayer:
    def __init__(
        self, client: AsyncClient, what: Replay, builder: PromptBuilder, on_ended: OnEnded
    ) -> None:
        self.run = ReplayRun(len(what.trace.requests))
        self._client = client
        self._what = what
        self._builder = builder
        self._on_ended = on_ended
        self._free = asyncio.Semaphore(what.max_in_flight)
        self._tree = PrefixTree(what.block_size)
        self._last_turns: dict[str, asyncio.Task[_EndedTurn]] = {}  # by session
        self._began_s = time.perf_counter()

    def _since_start_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(self._what.trace.requests):
                at_s = request.at_s * self._what.time_scale
                await asyncio.sleep(max(0.0, at_s - self._since_start_s()))
                before = self._last_turns.get(request.session)
                task = group.create_task(self._send(number, request, at_s, before))
                if request.session:
                    self._last_turns[request.session] = task

    def finish(self) -> None:
        self.run.duration_s = self._since_start_s()
        self.run.num_distinct_tokens = self._tree.num_blocks * self._what.block_size

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
        self._on_ended(ended)
