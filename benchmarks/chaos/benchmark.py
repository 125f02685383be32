"""Chaos run: a cluster under load while its processes are killed, stopped and partitioned.

Faults are injected from outside, by signals and TCP proxies; the processes under test run
unmodified, except that the KV transfer of nodes is wrapped (`faulty_transport`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from baton.client import AsyncClient, Retries
from baton.cluster import Child
from baton.kv_transfer.external_kv import KV
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.cluster_config import OPERATOR_TOKEN, ChaosClusterConfig
from benchmarks.chaos.faults import Fault, Script, TargetRole, faults
from benchmarks.chaos.hostile.latencies import BystanderLatencies, bystander_latencies
from benchmarks.chaos.hostile.processes import HostileProcesses
from benchmarks.chaos.hostile.requests import Attack
from benchmarks.chaos.injection import MAX_DELAY_S, FaultInjector
from benchmarks.chaos.leaks import held, memory_growth, named_memory, num_adapters, num_links
from benchmarks.chaos.load import AnswerOutcome, ChaosLoad
from benchmarks.chaos.report import Attempts, Report, report
from benchmarks.chaos.second_turns import loads_rows, skipped_loads
from benchmarks.chaos.sending import ChaosRequest, Router
from benchmarks.chaos.tier_load import TierLoad
from benchmarks.chaos.workload import (
    KnownAnswer,
    draw_requests,
    reference_answers,
)

LOOK_EVERY_S = 0.2
WARM_UP_SHARE = 0.4  # of a run: memory is measured of processes that have started by then
ONCE = Retries(max_attempts=1)  # no retries, so that every failure is visible


@dataclass(frozen=True, slots=True)
class ChaosBench:
    setting: ChaosClusterConfig
    script: Script
    num_clients: int = 6
    num_requests: int = 30
    images_share: float = 0.0  # of requests about pictures
    num_probes: int = 2  # of second turns, for each fault of these kinds
    attacks: tuple[Attack, ...] = tuple(Attack)  # of the hostile client, if there is one


@dataclass(frozen=True, slots=True)
class ChaosProgress:
    elapsed_s: float
    outcomes: Sequence[AnswerOutcome]
    num_in_flight: int
    num_injected: int
    latest: str


OnProgress = Callable[[ChaosProgress], None]


async def run(bench: ChaosBench, stop: asyncio.Event, on_progress: OnProgress) -> Report:
    """Run until done or until `stop` is set. Raises named errors."""
    script = bench.script
    drawn = faults(script, bench.setting.num_by_role)
    async with (
        ChaosCluster(bench.setting) as cluster,
        AsyncClient(cluster.address, retries=ONCE) as client,
    ):
        router = await cluster.router(client)
        requests = await _draw_requests(bench, router)
        answers = await _unless(stop, reference_answers(router, requests))
        if bench.images_share:
            from benchmarks.chaos.pictures import check_alone

            await asyncio.to_thread(check_alone, bench.setting.model, answers)
        await cluster.begin()
        async with AsyncExitStack() as lifetime:
            hostile: HostileProcesses | None = None
            target = cluster.hostile_target
            if target is not None:
                hostile = HostileProcesses(target, script.seed, bench.attacks)
                await lifetime.enter_async_context(hostile)
            chaos = ChaosRun(cluster, router, answers, bench.num_clients, script.seed, hostile)
            chaos.tier_load.num_probes = bench.num_probes
            chaos.has_pictures = bench.images_share > 0
            return await chaos.run(drawn, script.duration_s, stop, on_progress)


async def _draw_requests(bench: ChaosBench, router: Router) -> list[ChaosRequest]:
    seed, count = bench.script.seed, bench.num_requests
    if not bench.images_share:
        return await draw_requests(router, seed, count)
    from benchmarks.chaos.pictures import PICTURE_KINDS

    return await draw_requests(router, seed, count, PICTURE_KINDS, bench.images_share)


async def _unless(
    stop: asyncio.Event, generation: Coroutine[None, None, list[KnownAnswer]]
) -> list[KnownAnswer]:
    """Wait for the answers. Raises KeyboardInterrupt if `stop` is set before."""
    answers, stopping = asyncio.ensure_future(generation), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([answers, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise KeyboardInterrupt
        return answers.result()
    finally:
        for task in (answers, stopping):
            task.cancel()
        await asyncio.gather(answers, stopping, return_exceptions=True)


def ignore_progress(_: ChaosProgress) -> None:
    """Ignore the progress."""


class ChaosRun:
    """Load, faults and the check of everything at the end."""

    def __init__(
        self,
        cluster: ChaosCluster,
        router: Router,
        answers: Sequence[KnownAnswer],
        num_clients: int,
        seed: int = 0,
        hostile: HostileProcesses | None = None,
    ) -> None:
        self._cluster = cluster
        self._hostile = hostile
        self._client = client = router.client
        self.has_pictures = False  # requests are about pictures, too
        self._num_clients = num_clients
        self.load = ChaosLoad(router, answers, seed)
        self._attempts = Attempts()
        self.tier_load = TierLoad(cluster, client, seed)
        self._injector = FaultInjector(
            cluster, client, self.load, num_clients, self._attempts, hostile, self.tier_load
        )
        self._began_s = time.monotonic()

    async def run(
        self,
        faults: Sequence[Fault],
        duration_s: float,
        stop: asyncio.Event,
        on_progress: OnProgress = ignore_progress,
        max_delay_s: float = MAX_DELAY_S,
    ) -> Report:
        """Run the faults, once. It ends when all victims have recovered, if after `duration_s`.

        Faults that others delay by more than `max_delay_s` are left out.
        """
        load_end = asyncio.Event()
        self._began_s = time.monotonic()
        start_rss, middle_rss = self._cluster.rss(), self._cluster.rss()

        async def sample_middle() -> None:
            nonlocal middle_rss
            await asyncio.sleep(WARM_UP_SHARE * duration_s)
            before = self._cluster.rss()
            await asyncio.sleep((0.5 - WARM_UP_SHARE) * duration_s)
            # A process that has just started has not touched all of its KV memory yet.
            middle_rss = {
                name: (pid, num_bytes)
                for name, (pid, num_bytes) in self._cluster.rss().items()
                if name in before and before[name][0] == pid
            }

        async with asyncio.TaskGroup() as group:
            load = group.create_task(self.load.run(self._num_clients, load_end))
            progress = group.create_task(self._report_progress(on_progress))
            sampling = group.create_task(sample_middle())
            await self._injector.play(faults, duration_s, stop, max_delay_s)
            load_end.set()
            await load
            await self._injector.end()
            progress.cancel()
            sampling.cancel()
        ended_s = time.monotonic()
        if self._hostile is not None:
            await self._hostile.end()
        if self.has_pictures:  # encodings in use stay in memory, and are leaks
            await self._client.reset_prefix_caches((KV,), OPERATOR_TOKEN)
        leaks = await self._leaks()
        turns, injected = self.tier_load.turns, self._injector.injected
        token_bytes = await self.tier_load.token_bytes()
        return report(
            self.load.outcomes,
            injected,
            self._attempts,
            elapsed_s=ended_s - self._began_s,
            leaks=leaks,
            died=self._cluster.died(),
            memory=memory_growth(start_rss, middle_rss, self._cluster.rss()),
            bystanders=self._bystanders(),
            loads=list(loads_rows(turns, injected, token_bytes)),
            wrong_turns=[str(one) for one in turns if not one.is_right],
            skipped=[str(one) for one in skipped_loads(turns, injected, token_bytes)],
        )

    def _bystanders(self) -> BystanderLatencies | None:
        hostile = self._hostile
        if hostile is None:
            return None
        return bystander_latencies(hostile.waits, hostile.counts, self._injector.injected)

    async def _report_progress(self, on_progress: OnProgress) -> None:
        while True:
            injected = self._injector.injected
            latest = str(injected[-1].fault) if injected else ""
            elapsed_s = time.monotonic() - self._began_s
            load, num_injected = self.load, len(injected)
            on_progress(
                ChaosProgress(elapsed_s, load.outcomes, load.num_in_flight, num_injected, latest)
            )
            await asyncio.sleep(LOOK_EVERY_S)

    async def _leaks(self) -> list[str]:
        """Return what is leaked two leases and a second after the last request and fault."""
        end_s = time.monotonic() + 2 * self._cluster.lease_s + 1
        while True:
            leaks = [
                f"{child.name}: {leak}"
                for child in self._cluster.children
                for leak in await self._leaks_of(child)
            ]
            leaks += [f"rank {rank} of a node that has ended" for rank in self._cluster.strays()]
            left = named_memory() - self._cluster.named_memory_at_start
            leaks += [f"shared memory {name}" for name in sorted(left)]
            if not leaks or time.monotonic() >= end_s:
                return leaks
            await asyncio.sleep(LOOK_EVERY_S)

    async def _leaks_of(self, child: Child) -> list[str]:
        try:
            found = await self._cluster.scrape(child)
        except OSError as error:
            return [f"metrics unavailable: {error}"]
        if child.name == TargetRole.ROUTER.value:
            self._attempts.note(child.process.pid, found)
        num_new_links = num_links(found) - self._cluster.num_links_at_start[child.name]
        num_new_names = num_adapters(found) - self._cluster.num_adapters_at_start[child.name]
        return [
            *held(found),
            *self._cluster.grown(child, num_new_links),
            *self._excess_links(num_links(found)),
            *([f"{num_new_names} names of adapters"] if num_new_names > 0 else ()),
        ]

    def _excess_links(self, num_found: int) -> list[str]:
        """Return an error if a node has more than one link in each direction to every other one."""
        num_others = len(self._cluster.children) - 2  # without itself and the router
        return [f"{num_found} links to {num_others} nodes"] if num_found > 2 * num_others else []
