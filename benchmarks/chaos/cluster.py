"""Cluster under test: real processes, with a proxy in front of each prefill node."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from baton.client import AsyncClient
from baton.cluster import Child, LocalCluster
from baton.telemetry.metrics import names
from benchmarks.chaos import clock, slow_disk
from benchmarks.chaos.cluster_config import (
    ADAPTERS,
    OPERATOR_TOKEN,
    ChaosClusterConfig,
    cluster_options,
    kv_events_of,
)
from benchmarks.chaos.embedder_folder import make_embedder
from benchmarks.chaos.faults import TargetRole
from benchmarks.chaos.faulty_transport import FaultSwitch
from benchmarks.chaos.hostile.client import AttackTarget
from benchmarks.chaos.leaks import (
    Footprint,
    Rss,
    Scrape,
    footprint,
    grown,
    may_have_grown,
    named_memory,
    num_adapters,
    num_links,
    resident_bytes,
    scrape,
)
from benchmarks.chaos.preloading import preload
from benchmarks.chaos.proxy import NodeProxy
from benchmarks.chaos.ranks import is_running, ranks_of
from benchmarks.chaos.sending import EMBEDDER, Router
from benchmarks.chaos.tier_storage import TierStorage, tier_storage
from benchmarks.chaos.vllm_servers import VllmServers

METRICS_AT = re.compile(r"metrics on (http://\S+)")
LINKED_WITHIN_S, LOOK_EVERY_S = 60.0, 0.2


class ChaosCluster:
    """Runs the cluster within `async with`. Blocking steps run on threads."""

    def __init__(self, setting: ChaosClusterConfig) -> None:
        self._setting = setting
        self._loop = asyncio.get_running_loop()
        self._proxy_by_name: dict[str, NodeProxy] = {}
        self._metrics_by_pid: dict[int, str] = {}
        self._killed_pids: set[int] = set()
        self._ended_ranks: set[int] = set()  # of nodes that faults have ended
        self._lifetime = AsyncExitStack()
        self._folder = Path(self._lifetime.enter_context(TemporaryDirectory()))
        self._clocks = clock.build(self._folder) if setting.clocks_jump else None
        self.slow_disk = slow_disk.build(self._folder) if setting.disk_slows else None
        self.tier_storage: TierStorage | None = None
        if setting.kv_host_memory:
            storage = tier_storage(self._folder, setting.kv_folder_size)
            self.tier_storage = self._lifetime.enter_context(storage)
        self._vllm_servers = VllmServers(setting.model, setting.num_vllm)
        self._lifetime.enter_context(self._vllm_servers)
        make_embedder(self._folder / EMBEDDER)
        libraries = (self._clocks, self.slow_disk)
        environment = preload([library for library in libraries if library is not None])
        options = cluster_options(
            setting, self._folder, environment, self.tier_storage, self._vllm_servers
        )
        self._cluster = LocalCluster(
            replace(options, on_line=self._handle_line, router_target_of=self._found_at)
        )
        self.named_memory_at_start: set[str] = set()
        self.baseline: dict[str, Footprint] = {}  # by name
        self.num_links_at_start: dict[str, int] = {}
        self.num_adapters_at_start: dict[str, int] = {}

    async def __aenter__(self) -> ChaosCluster:
        try:
            await asyncio.to_thread(self._cluster.__enter__)
        except BaseException:
            await self._lifetime.aclose()
            raise
        return self

    async def begin(self) -> None:
        """Take the baseline for leak detection.

        Call it when every pair has handed something over, since data paths open at the first
        write.
        """
        for role, peers in (
            (TargetRole.PREFILL, TargetRole.DECODE),
            (TargetRole.DECODE, TargetRole.PREFILL),
        ):
            for place in range(self.num_by_role[role]):
                await self._until_linked(self.child(role, place), self.num_by_role[peers])
        self.named_memory_at_start = named_memory()
        self.baseline = {child.name: self.footprint(child) for child in self.children}
        scrapes = {child.name: await self.scrape(child) for child in self.children}
        self.num_links_at_start = {name: num_links(each) for name, each in scrapes.items()}
        self.num_adapters_at_start = {name: num_adapters(each) for name, each in scrapes.items()}

    async def _until_linked(self, child: Child, num_peers: int) -> None:
        """Wait for the KV links to all peers, so that they are part of the baseline."""
        async with asyncio.timeout(LINKED_WITHIN_S):
            while (await self.scrape(child)).total(names.LINKS, "up") < num_peers:
                await asyncio.sleep(LOOK_EVERY_S)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._cluster.children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(self._cluster.__exit__, None, None, None)
        await self._lifetime.aclose()

    @property
    def address(self) -> str:
        return self._cluster.address

    async def router(self, client: AsyncClient) -> Router:
        """Return the router as clients need it."""
        model = await client.model()
        return Router(client, self._cluster.router.http_address, model.name)

    @property
    def num_by_role(self) -> dict[TargetRole, int]:
        return self._setting.num_by_role

    @property
    def prefill_has_tiers(self) -> bool:
        return self._setting.prefill_has_tiers

    @property
    def block_size(self) -> int:
        return self._setting.block_size

    @property
    def lease_s(self) -> float:
        return self._setting.lease_s

    @property
    def children(self) -> list[Child]:
        return self._cluster.children

    @property
    def nodes(self) -> list[Child]:
        return [*self._cluster.prefills, *self._cluster.decodes]

    @property
    def decodes(self) -> list[Child]:
        return self._cluster.decodes

    def child(self, role: TargetRole, place: int) -> Child:
        match role:
            case TargetRole.ROUTER:
                return self._cluster.router
            case TargetRole.PREFILL:
                return self._cluster.prefills[place]
            case TargetRole.DECODE:
                return self._cluster.decodes[place]
            case TargetRole.EMBED:
                return self._cluster.embedders[place]
            case TargetRole.ENCODE:
                return self._cluster.encoders[place]
            case TargetRole.VLLM:
                return self._vllm_servers.children[place]

    def proxy(self, child: Child) -> NodeProxy:
        return self._proxy_by_name[child.name]

    def fault_switch(self, child: Child) -> FaultSwitch:
        """Return the fault switch of a node's KV transfer; it outlives restarts."""
        return FaultSwitch(self._folder / child.name)

    def shift_clock(self, child: Child, by_s: float) -> None:
        if self._clocks is not None and child.process.poll() is None:
            self._clocks.shift(child.process.pid, by_s)

    def kill(self, child: Child) -> None:
        self._expect_end(child)
        child.process.kill()

    def strike_rank(self, child: Child, draw: int, number: signal.Signals) -> int | None:
        """Send a signal to one of a node's further ranks, by a drawn number, and return it.

        None: the node has ended.
        """
        ranks = ranks_of(child.process.pid)
        if not ranks:
            return None
        if number is signal.SIGKILL:
            self._expect_end(child)
        rank = ranks[draw % len(ranks)]
        os.kill(rank, number)
        return rank

    async def wait_for_end(self, child: Child) -> None:
        """Wait until a node has ended, because of one of its ranks."""
        self._expect_end(child)
        await asyncio.to_thread(child.process.wait)

    def strays(self) -> list[int]:
        """Return the ranks that run without the first one of their node."""
        return [rank for rank in self._ended_ranks if is_running(rank)]

    def _expect_end(self, child: Child) -> None:
        self._killed_pids.add(child.process.pid)
        self._ended_ranks |= {*ranks_of(child.process.pid)}

    async def restart(self, dead: Child) -> Child:
        """Start a new process in place of a dead one. Raises ClusterFailed."""
        await asyncio.to_thread(dead.process.wait)
        return await asyncio.to_thread(self._cluster.restart, dead)

    def signal(self, child: Child, number: signal.Signals) -> None:
        if child.process.poll() is None:
            os.kill(child.process.pid, number)

    def died(self) -> list[str]:
        """Return the processes that ended without being killed, with the end of their logs."""
        return [
            f"{child.name} ended with code {child.process.returncode}\n{child.log}"
            for child in self.children
            if child.process.poll() is not None and child.process.pid not in self._killed_pids
        ]

    async def scrape(self, child: Child) -> Scrape:
        """Read the metrics of a process. Raises OSError if it does not answer."""
        return await asyncio.to_thread(scrape, self._metrics_by_pid[child.process.pid])

    @property
    def hostile_target(self) -> AttackTarget | None:
        """Return the addresses for the hostile client; None without one."""
        if not self._setting.has_hostile_client:
            return None
        return AttackTarget(
            self._cluster.router.http_address,
            self.address,
            [child.address for child in self._cluster.decodes],
            [child.address for child in self._cluster.prefills],
            [kv_events_of(self._folder, child.name) for child in self.nodes],
            OPERATOR_TOKEN,
            str(self._folder / ADAPTERS),
        )

    def rss(self) -> Rss:
        """Return the resident memory of the running processes. A fault can end one meanwhile."""
        found = {
            child.name: (child.process.pid, resident_bytes(child.process.pid))
            for child in self.children
            if child.process.poll() is None
        }
        return {name: memory for name, memory in found.items() if memory[1]}

    def footprint(self, child: Child) -> Footprint:
        """Return the resources of a process, without the pool of connections to the objects."""
        storage = self.tier_storage
        return footprint(child.process.pid, () if storage is None else (storage.port,))

    def grown(self, child: Child, num_new_links: int) -> Iterator[str]:
        """Yield resources of a process that have grown since `begin`."""
        before = self.baseline[child.name]
        if may_have_grown(before, child.process.pid, num_new_links):
            yield from grown(before, self.footprint(child), num_new_links)

    def _handle_line(self, child: Child, line: str) -> None:
        found = METRICS_AT.search(line)
        if found is not None:
            self._metrics_by_pid[child.process.pid] = found[1]
        if self._setting.log_dir is not None:
            with (self._setting.log_dir / f"{child.name}.log").open("a", encoding="utf-8") as log:
                log.write(f"{child.process.pid} {line}")

    def _found_at(self, child: Child) -> str:
        """Return the address to publish: for prefill nodes that of their proxy, which persists."""
        if not child.name.startswith(TargetRole.PREFILL.value):
            return child.address
        proxy = self._proxy_by_name.get(child.name)
        if proxy is None:
            proxy = self._proxy_by_name[child.name] = NodeProxy(child.address)
            asyncio.run_coroutine_threadsafe(self._open(proxy), self._loop).result()
        return proxy.address

    async def _open(self, proxy: NodeProxy) -> None:
        await proxy.open()
        self._lifetime.push_async_callback(proxy.close)
