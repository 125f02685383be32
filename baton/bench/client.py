"""Open-loop load client: sends requests at their planned times and records token arrivals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.bench.load import PlannedRequest
from baton.bench.running import run_until
from baton.client import AsyncClient, BatonError, Finish, Generation
from baton.core.sampling import SamplingParams

# A request sent more than this after its planned time counts as late.
LATE_S = 0.01
LAG_EVERY_S = 0.02


@dataclass(slots=True)
class Sample:
    """One request as seen by its client. Times are seconds since the start of the run."""

    number: int
    planned_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and number of tokens
    finish: Finish | None = None
    error: str | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        return self.sent_s - self.planned_s > LATE_S


@dataclass(slots=True)
class LoadRun:
    """One plan, sent once."""

    samples: list[Sample] = field(default_factory=list)
    num_planned: int = 0
    duration_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)  # of this process's event loop
    cpu_s: float = 0.0  # of this process
    is_cut_short: bool = False


async def send(
    client: AsyncClient,
    requests: Sequence[PlannedRequest],
    *,
    concurrency: int | None = None,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[int, int], None] = lambda _ended, _planned: None,
) -> LoadRun:
    """Send the requests. Those unfinished when `stop` is set are not part of the run."""
    run = LoadRun(num_planned=len(requests))
    sender = _Sender(client, asyncio.Semaphore(concurrency or max(1, len(requests))))
    cpu_before_s = time.process_time()
    async with _lag_noted(run.lags_s):
        sending = sender.send_all(requests, run, on_progress)
        run.is_cut_short = await run_until(stop or asyncio.Event(), sending)
    run.duration_s = sender.since_start_s()
    run.cpu_s = time.process_time() - cpu_before_s
    return run


class _Sender:
    def __init__(self, client: AsyncClient, free: asyncio.Semaphore) -> None:
        self._client = client
        self._free = free
        self._began_s = time.perf_counter()

    def since_start_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def send_all(
        self,
        requests: Sequence[PlannedRequest],
        run: LoadRun,
        on_progress: Callable[[int, int], None],
    ) -> None:
        async def one(request: PlannedRequest) -> None:
            async with self._free:
                sample = await send_one(self._client, request, self.since_start_s)
            run.samples.append(sample)
            on_progress(len(run.samples), len(requests))

        async with asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(max(0.0, request.at_s - self.since_start_s()))
                group.create_task(one(request))


async def send_one(
    client: AsyncClient, request: PlannedRequest, since_start_s: Callable[[], float]
) -> Sample:
    """Send one request now and return when its answer has ended."""
    sample = Sample(request.number, request.at_s, since_start_s())
    sampling = SamplingParams(
        max_tokens=request.max_tokens, temperature=0.0, seed=request.seed, ignore_eos=True
    )
    try:
        async for chunk in client.stream(request.prompt, Generation(sampling)):
            if chunk.token_ids:
                sample.arrivals.append((since_start_s(), len(chunk.token_ids)))
                sample.token_ids += chunk.token_ids
            sample.finish = chunk.finish or sample.finish
    except BatonError as error:
        sample.error = error.reason or error.code.name
    sample.ended_s = since_start_s()
    return sample


@asynccontextmanager
async def _lag_noted(lags_s: list[float]) -> AsyncIterator[None]:
    """Record the event-loop lag of this process, which bounds its measurement error."""

    async def watch() -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            lags_s.append(max(0.0, time.perf_counter() - before_s - LAG_EVERY_S))

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
