"""Fault injection: plays a script of faults on a cluster under load."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from baton.client import AsyncClient, BatonError
from baton.cluster import Child, await_serving
from baton.core.legs import LegKind
from baton.kv_transfer.external_kv import TIERS
from baton.rpc.channel import KEEPALIVE
from baton.telemetry.metrics import names as metrics
from benchmarks.chaos.adapter_reloads import AdapterReloads
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.cluster_config import OPERATOR_TOKEN
from benchmarks.chaos.faults import (
    FAULTS_WITHOUT_VICTIM,
    PROBES,
    RANK_FAULTS,
    SHARED_FAULTS,
    STORAGE_FAULTS,
    TIER_LOAD,
    TRANSFER_FAULTS,
    Fault,
    FaultKind,
    InjectedFault,
    TargetRole,
)
from benchmarks.chaos.hostile.processes import HostileProcesses
from benchmarks.chaos.load import ChaosLoad
from benchmarks.chaos.pauses import pause
from benchmarks.chaos.report import Attempts
from benchmarks.chaos.tier_load import TierLoad
from benchmarks.chaos.tier_storage import TierStorage

PHASE_PATIENCE_S = 2.0
MAX_DELAY_S = 20.0
READY_WITHIN_S = 120.0
LOOK_EVERY_S = 0.2
LEND_DRAIN_S = 1.0
OVERLOAD_FACTOR = 4
SLOW_STOPPED_S, SLOW_RUNNING_S = 0.2, 0.1
JUMP_S = 3600.0
WIRE_PATIENCE_S = 10.0
LASTING_STORAGE_FAULTS = frozenset({FaultKind.BLOCK, FaultKind.DOWN, FaultKind.SILENT})
FREEZE_S = KEEPALIVE.every_s + KEEPALIVE.patience_s + 4.0


class FaultInjector:
    """Injects faults from outside the processes, and waits for the recovery of each victim."""

    def __init__(
        self,
        cluster: ChaosCluster,
        client: AsyncClient,
        load: ChaosLoad,
        num_clients: int,
        attempts: Attempts,
        hostile: HostileProcesses | None,
        tier_load: TierLoad,
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._load = load
        self._num_clients = num_clients
        self._attempts = attempts
        self._hostile = hostile
        self._tier_load = tier_load
        self._adapter_reloads = AdapterReloads(client)
        self._affected: set[str] = set()
        self._storage_lock = asyncio.Lock()  # one fault of files and objects at a time
        self._restart_lock = asyncio.Lock()  # no restarts while the folder is blocked
        self._began_s = 0.0
        self.injected: list[InjectedFault] = []

    async def play(
        self,
        faults: Sequence[Fault],
        duration_s: float,
        stop: asyncio.Event,
        max_delay_s: float = MAX_DELAY_S,
    ) -> None:
        """Inject the faults at their times; return when all victims have recovered.

        Faults that second turns delay by more than `max_delay_s` are left out.
        """
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as recoveries:
            for fault in faults:
                if not await self._wait_until(fault.at_s, stop):
                    return
                if time.monotonic() - self._began_s > fault.at_s + max_delay_s:
                    continue
                await self._load.reached(fault.phase, PHASE_PATIENCE_S)
                victim = self._victim(fault)
                if victim is None:
                    continue
                if fault.kind not in FAULTS_WITHOUT_VICTIM:
                    self._affected.add(victim.name)
                recovery = recoveries.create_task(self._inject(fault, victim))
                if fault.kind in PROBES:
                    await recovery  # no other fault begins meanwhile
            await self._wait_until(duration_s, stop)

    async def end(self) -> None:
        """Undo what faults may have left, when all victims have recovered."""
        if any(one.fault.kind is FaultKind.ADAPTERS for one in self.injected):
            await self._adapter_reloads.end()

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
        """Return a healthy process of the role. The last node to decode or to embed is spared.

        Some faults need none: they stand for the router, whatever its state is.
        """
        if fault.kind in FAULTS_WITHOUT_VICTIM:
            return self._cluster.child(TargetRole.ROUTER, 0)
        count = self._cluster.num_by_role[fault.role]
        places = [(fault.place + step) % count for step in range(count)]
        siblings = [self._cluster.child(fault.role, place) for place in places]
        healthy = [child for child in siblings if child.name not in self._affected]
        if fault.role in (TargetRole.DECODE, TargetRole.EMBED) and len(healthy) < 2:
            return None
        return healthy[0] if healthy else None

    async def _inject(self, fault: Fault, victim: Child) -> None:
        injected = InjectedFault(fault, victim.name, time.monotonic())
        self.injected.append(injected)
        try:
            if fault.kind in SHARED_FAULTS:
                await self._strike_all(injected)
            elif fault.kind in RANK_FAULTS:
                await self._strike_rank(victim, injected)
            else:
                await self._strike(injected, victim)
        finally:
            injected.recovered_s = time.monotonic()
            if fault.role is TargetRole.VLLM:
                injected.evidence = {"KV blocks of vLLM so far": await self._num_foreign_blocks()}
            if fault.kind not in FAULTS_WITHOUT_VICTIM:
                self._affected.discard(victim.name)

    async def _strike(self, injected: InjectedFault, victim: Child) -> None:
        fault = injected.fault
        match fault.kind:
            case FaultKind.KILL:
                await self._kill(victim, injected)
            case FaultKind.STOP:
                await self._stop(victim, fault.lasts_s)
            case FaultKind.FREEZE:
                await self._stop(victim, FREEZE_S)
                await self._until_ready(victim.name, victim.http_address)
            case FaultKind.SLOW:
                await self._slow(victim, fault.lasts_s)
            case FaultKind.PAUSE:
                await pause(injected, victim)
                await self._until_ready(victim.name)
            case FaultKind.CUT | FaultKind.STALL:
                await self._block_links(victim, fault)
            case FaultKind.JUMP:
                await self._jump(victim, fault)
            case FaultKind.LEND:
                await self._lend(victim, injected)
            case kind if kind in TRANSFER_FAULTS:
                await self._disturb_transfers(victim, injected)

    async def _lend(self, victim: Child, injected: InjectedFault) -> None:
        """Let a node offer the other kind of leg, then its own again."""
        fault = injected.fault
        own, other = LegKind.PREFILL, LegKind.DECODE
        if fault.role is TargetRole.DECODE:
            own, other = other, own
        took_s = [await self._set_legs(victim, other)]
        await asyncio.sleep(fault.lasts_s)
        took_s.append(await self._set_legs(victim, own))
        injected.evidence = {"seconds beyond the drain": max(took_s) - LEND_DRAIN_S}

    async def _set_legs(self, victim: Child, kind: LegKind) -> float:
        """Return how many seconds the change took."""
        began_s = time.monotonic()
        while True:
            try:
                await self._client.set_legs(victim.name, [kind], LEND_DRAIN_S, OPERATOR_TOKEN)
            except BatonError:
                if time.monotonic() - began_s > READY_WITHIN_S:
                    raise
                await asyncio.sleep(LOOK_EVERY_S)  # the router is stopped or being replaced
            else:
                return time.monotonic() - began_s

    async def _num_foreign_blocks(self) -> float:
        scrapes = [await self._cluster.scrape(each) for each in self._cluster.decodes]
        return sum(each.total(metrics.FOREIGN_BLOCKS) for each in scrapes)

    async def _strike_all(self, injected: InjectedFault) -> None:
        fault = injected.fault
        match fault.kind:
            case FaultKind.OVERLOAD:
                await self._run_overload(fault.lasts_s)
            case FaultKind.HOSTILE:
                await self._attack(injected)
            case FaultKind.RESET:
                await self._reset(injected)
            case FaultKind.ADAPTERS:
                await self._adapter_reloads.strike(injected)
            case kind if kind in STORAGE_FAULTS:
                await self._disturb_storage(injected)
            case kind if kind in TIER_LOAD and self._cluster.tier_storage is not None:
                await self._tier_load.strike(injected)

    async def _kill(self, victim: Child, injected: InjectedFault) -> None:
        if injected.fault.role is TargetRole.ROUTER:
            await self._count_attempts(victim)
        injected.at_s = time.monotonic()
        self._cluster.kill(victim)
        async with self._restart_lock:
            child = await self._cluster.restart(victim)
        injected.listening_s = time.monotonic()
        if injected.fault.role is TargetRole.ROUTER:
            await asyncio.to_thread(await_serving, child.address, READY_WITHIN_S)
        else:
            await self._until_ready(child.name)

    async def _strike_rank(self, victim: Child, injected: InjectedFault) -> None:
        kind, began_s = injected.fault.kind, time.monotonic()
        number = signal.SIGKILL if kind is FaultKind.KILL_RANK else signal.SIGSTOP
        rank = self._cluster.strike_rank(victim, injected.fault.number, number)
        if rank is None:
            return
        if kind is FaultKind.STOP_RANK:
            await asyncio.sleep(injected.fault.lasts_s)
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)
            return
        await self._cluster.wait_for_end(victim)
        injected.evidence = {"seconds until the node ended": time.monotonic() - began_s}
        await self._kill(victim, injected)

    async def _count_attempts(self, router: Child) -> None:
        with suppress(OSError):  # it may be stopped
            self._attempts.note(router.process.pid, await self._cluster.scrape(router))

    async def _until_ready(self, name: str, vllm_address: str = "") -> None:
        """Wait until the router reports the node, or the vLLM server at this address, as ready.

        The router may be down, too.
        """
        wanted = {name, vllm_address} - {""}
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                with suppress(BatonError):
                    async for nodes in self._client.nodes(LOOK_EVERY_S):
                        ready = {one for one in nodes if one.state == "ready"}
                        if wanted & {name for one in ready for name in (one.node_id, one.address)}:
                            return
                await asyncio.sleep(LOOK_EVERY_S)

    async def _stop(self, victim: Child, lasts_s: float) -> None:
        self._cluster.signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._cluster.signal(victim, signal.SIGCONT)

    async def _slow(self, victim: Child, lasts_s: float) -> None:
        end_s = time.monotonic() + lasts_s
        while time.monotonic() < end_s:
            await self._stop(victim, SLOW_STOPPED_S)
            await asyncio.sleep(SLOW_RUNNING_S)

    async def _block_links(self, victim: Child, fault: Fault) -> None:
        proxy = self._cluster.proxy(victim)
        (proxy.cut if fault.kind is FaultKind.CUT else proxy.stall)()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            proxy.heal()

    async def _disturb_transfers(self, victim: Child, injected: InjectedFault) -> None:
        """Inject the fault until its time is over and it has hit a message, within a limit."""
        fault = injected.fault
        switch = self._cluster.fault_switch(victim)
        num_hits = switch.num_hits
        switch.turn(fault.kind)
        try:
            await asyncio.sleep(fault.lasts_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(WIRE_PATIENCE_S):
                    while switch.num_hits == num_hits:
                        await asyncio.sleep(LOOK_EVERY_S)
        finally:
            switch.clear()
            injected.evidence = {"messages and writes": switch.num_hits - num_hits}

    async def _disturb_storage(self, injected: InjectedFault) -> None:
        """Damage what the tiers have stored, or keep them from it for a while."""
        fault, storage = injected.fault, self._cluster.tier_storage
        if storage is None:
            return
        async with self._storage_lock:
            if fault.kind is FaultKind.BLOCK:
                async with self._restart_lock:
                    await self._hold(storage, fault)
            elif fault.kind in LASTING_STORAGE_FAULTS:
                await self._hold(storage, fault)
            else:
                num_damaged = await asyncio.to_thread(storage.damage, fault.kind)
                injected.evidence = {"blocks damaged": num_damaged}

    async def _hold(self, storage: TierStorage, fault: Fault) -> None:
        with storage.disturbed(fault.kind):
            await asyncio.sleep(fault.lasts_s)

    async def _reset(self, injected: InjectedFault) -> None:
        """Reset the prefix cache with all tiers, or one of them. Dead nodes do not confirm it."""
        choices = ((), *((tier,) for tier in TIERS))
        with suppress(BatonError):
            tiers = choices[injected.fault.number % len(choices)]
            cleared = await self._client.reset_prefix_caches(tiers, OPERATOR_TOKEN)
            num_blocks = sum(sum(by_tier.values()) for by_tier in cleared.values())
            injected.evidence = {"blocks cleared": num_blocks}

    async def _jump(self, victim: Child, fault: Fault) -> None:
        """Set the clock forward or back for a while."""
        self._cluster.shift_clock(victim, JUMP_S if fault.number % 2 else -JUMP_S)
        await asyncio.sleep(fault.lasts_s)
        self._cluster.shift_clock(victim, 0.0)

    async def _attack(self, injected: InjectedFault) -> None:
        if self._hostile is not None:
            attack, injected.outcomes = await self._hostile.attack()
            injected.attack = attack.value

    async def _run_overload(self, lasts_s: float) -> None:
        enough = asyncio.Event()
        asyncio.get_running_loop().call_later(lasts_s, enough.set)
        await self._load.run(OVERLOAD_FACTOR * self._num_clients, enough)
