"""Chaos run: a cluster under load while its processes are killed, stopped and partitioned.

Faults are injected from outside, by signals and TCP proxies; the processes under test run
unmodified, except that the KV transfer of nodes is wrapped (`chaos_wire`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from baton.client import AsyncClient, BatonError, Retries
from baton.cluster import Child, await_serving
from benchmarks.chaos.cluster import ChaosCluster, ChaosClusterConfig
from benchmarks.chaos.faults import TRANSFER_FAULTS, Fault, FaultKind, Script, TargetRole, faults
from benchmarks.chaos.hostile.latencies import Bystanders, InjectedFault, bystanders, memory
from benchmarks.chaos.hostile.processes import HostileProcesses
from benchmarks.chaos.hostile.requests import Attack
from benchmarks.chaos.leaks import grown, held
from benchmarks.chaos.load import AnswerOutcome, ChaosLoad
from benchmarks.chaos.report import Attempts, Report, report
from benchmarks.chaos.workload import KnownAnswer, asks, known
from rpc.channel import KEEPALIVE

PHASE_PATIENCE_S = 2.0
READY_WITHIN_S = 120.0
LOOK_EVERY_S = 0.2
CROWD_FACTOR = 4
SLOW_STOPPED_S, SLOW_RUNNING_S = 0.2, 0.1
JUMP_S = 3600.0
WIRE_PATIENCE_S = 10.0
FREEZE_S = KEEPALIVE.every_s + KEEPALIVE.patience_s + 4.0
ONCE = Retries(max_attempts=1)  # no retries, so that every failure is visible


@dataclass(frozen=True, slots=True)
class ChaosBench:
    setting: ChaosClusterConfig
    script: Script
    num_clients: int = 6
    num_asks: int = 30
    attacks: tuple[Attack, ...] = tuple(Attack)  # of the hostile client, if there is one


@dataclass(frozen=True, slots=True)
class ChaosProgress:
    elapsed_s: float
    told: Sequence[AnswerOutcome]
    num_under_way: int
    num_struck: int
    latest: str  # latest fault


OnProgress = Callable[[ChaosProgress], None]


async def run(what: ChaosBench, stop: asyncio.Event, on_progress: OnProgress) -> Report:
    """Run until done or until `stop` is set. Raises named errors."""
    script = what.script
    drawn = faults(script, what.setting.num_by_role)
    async with (
        ChaosCluster(what.setting) as stage,
        AsyncClient(stage.address, retries=ONCE) as client,
    ):
        requests = await asks(client, script.seed, what.num_asks)
        answers = await _unless(stop, known(client, requests))
        await stage.begin()
        async with AsyncExitStack() as lifetime:
            hostility: HostileProcesses | None = None
            target = stage.hostile_target
            if target is not None:
                hostility = HostileProcesses(target, script.seed, what.attacks)
                await lifetime.enter_async_context(hostility)
            chaos = Chaos(stage, client, answers, what.num_clients, script.seed, hostility)
            return await chaos.run(drawn, script.duration_s, stop, on_progress)


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


class Chaos:
    def __init__(
        self,
        stage: ChaosCluster,
        client: AsyncClient,
        answers: Sequence[KnownAnswer],
        num_clients: int,
        seed: int = 0,
        hostility: HostileProcesses | None = None,
    ) -> None:
        self._stage = stage
        self._hostility = hostility
        self._client = client
        self._num_clients = num_clients
        self._load = ChaosLoad(client, answers, seed)
        self._ailing: set[str] = set()
        self._struck: list[InjectedFault] = []
        self._attempts = Attempts()
        self._began_s = time.monotonic()

    async def run(
        self,
        faults: Sequence[Fault],
        duration_s: float,
        stop: asyncio.Event,
        on_progress: OnProgress = ignore_progress,
    ) -> Report:
        """Run the faults, once. It ends when all victims have recovered, if after `duration_s`."""
        load_end = asyncio.Event()
        self._began_s = time.monotonic()
        start_rss, middle_rss = self._stage.rss(), self._stage.rss()

        async def sample_middle() -> None:
            nonlocal middle_rss
            await asyncio.sleep(duration_s / 2)
            middle_rss = self._stage.rss()

        async with asyncio.TaskGroup() as group:
            load = group.create_task(self._load.run(self._num_clients, load_end))
            progress = group.create_task(self._report_progress(on_progress))
            sampling = group.create_task(sample_middle())
            await self._play(faults, duration_s, stop)
            load_end.set()
            await load
            progress.cancel()
            sampling.cancel()
        ended_s = time.monotonic()
        if self._hostility is not None:
            await self._hostility.end()
        leaks = await self._leaks()
        return report(
            self._load.told,
            self._struck,
            self._attempts,
            elapsed_s=ended_s - self._began_s,
            leaks=leaks,
            died=self._stage.died(),
            memory=memory(start_rss, middle_rss, self._stage.rss()),
            bystanders=self._bystanders(),
        )

    def _bystanders(self) -> Bystanders | None:
        if self._hostility is None:
            return None
        return bystanders(self._hostility.waits, self._hostility.counts, self._struck)

    # --- Faults -----------------------------------------------------------------------------

    async def _play(self, faults: Sequence[Fault], duration_s: float, stop: asyncio.Event) -> None:
        """Inject the faults of the script; return when all victims have recovered."""
        async with asyncio.TaskGroup() as recoveries:
            for fault in faults:
                if not await self._wait_until(fault.at_s, stop):
                    return
                await self._load.reached(fault.phase, PHASE_PATIENCE_S)
                victim = self._victim(fault)
                if victim is not None:
                    self._ailing.add(victim.name)
                    recoveries.create_task(self._strike(fault, victim))
            await self._wait_until(duration_s, stop)

    async def _wait_until(self, at_s: float, stop: asyncio.Event) -> bool:
        """Wait; return False if `stop` was set before."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._loop_time(at_s)):
                await stop.wait()
        return not stop.is_set()

    def _loop_time(self, at_s: float) -> float:
        elapsed_s = time.monotonic() - self._began_s
        return asyncio.get_running_loop().time() + at_s - elapsed_s

    def _victim(self, fault: Fault) -> Child | None:
        """Return a healthy process of the role. The last healthy decode node is spared."""
        count = self._stage.num_by_role[fault.role]
        places = [(fault.place + step) % count for step in range(count)]
        siblings = [self._stage.child(fault.role, place) for place in places]
        healthy = [child for child in siblings if child.name not in self._ailing]
        if fault.role is TargetRole.DECODE and len(healthy) < 2:
            return None
        return healthy[0] if healthy else None

    async def _strike(self, fault: Fault, victim: Child) -> None:
        struck = InjectedFault(fault, victim.name, time.monotonic())
        self._struck.append(struck)
        try:
            match fault.kind:
                case FaultKind.KILL:
                    await self._kill(victim, struck)
                case FaultKind.STOP:
                    await self._stop(victim, fault.lasts_s)
                case FaultKind.FREEZE:
                    await self._stop(victim, FREEZE_S)
                    await self._until_ready(victim.name)
                case FaultKind.SLOW:
                    await self._slow(victim, fault.lasts_s)
                case FaultKind.CUT | FaultKind.HUSH:
                    await self._block_links(victim, fault)
                case FaultKind.CROWD:
                    await self._run_crowd(fault.lasts_s)
                case FaultKind.JUMP:
                    await self._jump(victim, fault)
                case FaultKind.HOSTILE:
                    await self._attack(struck)
                case kind if kind in TRANSFER_FAULTS:
                    await self._disturb_transfers(victim, fault)
        finally:
            struck.healed_s = time.monotonic()
            self._ailing.discard(victim.name)

    async def _kill(self, victim: Child, struck: InjectedFault) -> None:
        if struck.fault.role is TargetRole.ROUTER:
            await self._count_attempts(victim)
        struck.at_s = time.monotonic()
        self._stage.kill(victim)
        child = await self._stage.restart(victim)
        struck.listens_s = time.monotonic()
        if struck.fault.role is TargetRole.ROUTER:
            await asyncio.to_thread(await_serving, child.address, READY_WITHIN_S)
        else:
            await self._until_ready(child.name)

    async def _count_attempts(self, router: Child) -> None:
        with suppress(OSError):  # it may be stopped
            self._attempts.note(router.process.pid, await self._stage.scrape(router))

    async def _until_ready(self, name: str) -> None:
        """Wait until the router reports the node as ready; the router may be down, too."""
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                with suppress(BatonError):
                    async for nodes in self._client.nodes(LOOK_EVERY_S):
                        if any(one.node_id == name and one.state == "ready" for one in nodes):
                            return
                await asyncio.sleep(LOOK_EVERY_S)

    async def _stop(self, victim: Child, lasts_s: float) -> None:
        self._stage.signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._stage.signal(victim, signal.SIGCONT)

    async def _slow(self, victim: Child, lasts_s: float) -> None:
        end_s = time.monotonic() + lasts_s
        while time.monotonic() < end_s:
            await self._stop(victim, SLOW_STOPPED_S)
            await asyncio.sleep(SLOW_RUNNING_S)

    async def _block_links(self, victim: Child, fault: Fault) -> None:
        door = self._stage.door(victim)
        (door.cut if fault.kind is FaultKind.CUT else door.hush)()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            door.heal()

    async def _disturb_transfers(self, victim: Child, fault: Fault) -> None:
        """Inject the fault until its time is over and it has hit a message, within a limit."""
        weather = self._stage.weather(victim)
        num_hits = weather.num_hits
        weather.turn(fault.kind)
        try:
            await asyncio.sleep(fault.lasts_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(WIRE_PATIENCE_S):
                    while weather.num_hits == num_hits:
                        await asyncio.sleep(LOOK_EVERY_S)
        finally:
            weather.clear()

    async def _jump(self, victim: Child, fault: Fault) -> None:
        """Set the clock forward or back for a while."""
        self._stage.shift_clock(victim, JUMP_S if fault.number % 2 else -JUMP_S)
        await asyncio.sleep(fault.lasts_s)
        self._stage.shift_clock(victim, 0.0)

    async def _attack(self, struck: InjectedFault) -> None:
        if self._hostility is not None:
            attack, struck.outcomes = await self._hostility.attack()
            struck.attack = attack.value

    async def _run_crowd(self, lasts_s: float) -> None:
        enough = asyncio.Event()
        asyncio.get_running_loop().call_later(lasts_s, enough.set)
        await self._load.run(CROWD_FACTOR * self._num_clients, enough)

    # --- Observation -----------------------------------------------------------------------

    async def _report_progress(self, on_progress: OnProgress) -> None:
        while True:
            latest = str(self._struck[-1].fault) if self._struck else ""
            elapsed_s = time.monotonic() - self._began_s
            told, num_under_way = self._load.told, self._load.num_under_way
            on_progress(ChaosProgress(elapsed_s, told, num_under_way, len(self._struck), latest))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _leaks(self) -> list[str]:
        """Return what is still held two leases and a second after the last request and fault."""
        end_s = time.monotonic() + 2 * self._stage.lease_s + 1
        while True:
            leaks = [
                f"{child.name}: {leak}"
                for child in self._stage.children
                for leak in await self._leaks_of(child)
            ]
            if not leaks or time.monotonic() >= end_s:
                return leaks
            await asyncio.sleep(LOOK_EVERY_S)

    async def _leaks_of(self, child: Child) -> list[str]:
        try:
            found = await self._stage.scrape(child)
        except OSError as error:
            return [f"metrics unavailable: {error}"]
        if child.name == TargetRole.ROUTER.value:
            self._attempts.note(child.process.pid, found)
        before, now = self._stage.baseline[child.name], self._stage.footprint(child)
        return [*held(found), *grown(before, now)]
