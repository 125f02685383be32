"""Every kind of fault on every role it applies to, under load: all answers stay correct."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from baton.client import AsyncClient
from baton.telemetry.metrics.names import (
    ATTEMPTS,
    DIGEST_MISMATCHES,
    PREEMPTIONS,
    TIER_TOKENS,
    Metric,
)
from baton.telemetry.names import MIGRATE
from benchmarks.chaos import tier_load, workload
from benchmarks.chaos.benchmark import ONCE, ChaosProgress, ChaosRun
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.cluster_config import ChaosClusterConfig
from benchmarks.chaos.faults import (
    RANK_FAULTS,
    ROLES_BY_FAULT_KIND,
    TIER_FAULTS,
    TRANSFER_FAULTS,
    Fault,
    FaultKind,
    Phase,
    TargetRole,
)
from benchmarks.chaos.hostile import processes as hostile_processes
from benchmarks.chaos.hostile.processes import HostileProcesses
from benchmarks.chaos.hostile.requests import ACCEPTED, Attack
from benchmarks.chaos.preloading import has_compiler
from benchmarks.chaos.report import Report
from benchmarks.chaos.workload import KnownAnswer, draw_requests, reference_answers
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder

NUM_ASKS = 15
NUM_LONG_ASKS = len(workload.KINDS)  # with answers of full length
MAX_TOKENS = 32  # of most answers: the load takes two thirds of the time that it takes with 96
NUM_CLIENTS = 4
STRIKES_AT_S, LASTS_S = 0.1, 1.0
MAX_TRIES = 3
POOLED = {"embed", "encode", "rerank"}
# Of each client after an answer, once the fault has struck: it leaves the cores to other tests.
PAUSE_S, LONG_PAUSE_S = 0.5, 3.0
OWN_TESTS = {
    *(FaultKind.FREEZE, FaultKind.CORRUPT, FaultKind.OVERLOAD, FaultKind.HOSTILE),
    FaultKind.ADAPTERS,
    *TIER_FAULTS,
    *RANK_FAULTS,
}
FAULTS: list[tuple[FaultKind, TargetRole]] = [
    (kind, role)
    for kind in FaultKind
    if kind not in OWN_TESTS
    for role in ROLES_BY_FAULT_KIND[kind]
    # They need a cluster without prefill nodes, and a model that sees.
    if role not in (TargetRole.VLLM, TargetRole.ENCODE)
]

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Running:
    runner: asyncio.Runner
    cluster: ChaosCluster
    answers: Sequence[KnownAnswer]

    def through(self, *faults: Fault, pause_s: float = PAUSE_S) -> Report:
        async def scenario() -> Report:
            async with AsyncClient(self.cluster.address, retries=ONCE) as client:
                router = await self.cluster.router(client)
                chaos = ChaosRun(self.cluster, router, self.answers, NUM_CLIENTS)
                return await paced(chaos, faults, pause_s)

        return self.runner.run(scenario())

    def until_counted(
        self,
        fault: Fault,
        counter: Metric,
        label: str = "",
        *,
        role: TargetRole = TargetRole.DECODE,
        pause_s: float = PAUSE_S,
    ) -> Report:
        """Repeat a fault until it is counted; on a busy machine it can miss."""
        before = self.total(role, counter, label)
        for _ in range(MAX_TRIES):
            report = self.through(fault, pause_s=pause_s)
            assert report.is_good, report
            if self.total(role, counter, label) > before:
                return report
        raise AssertionError(f"{counter.name} did not grow in {MAX_TRIES} faults")

    def under(self, attack: Attack) -> Report:
        """Run a hostile client in parallel to the load and two bystanders."""

        async def scenario() -> Report:
            target = self.cluster.hostile_target
            assert target is not None
            async with (
                AsyncClient(self.cluster.address, retries=ONCE) as client,
                HostileProcesses(target, 0, (attack,)) as hostile,
            ):
                router = await self.cluster.router(client)
                chaos = ChaosRun(self.cluster, router, self.answers, NUM_CLIENTS, hostile=hostile)
                fault = Fault(
                    0, STRIKES_AT_S, FaultKind.HOSTILE, TargetRole.ROUTER, 0, Phase.SENT, LASTS_S
                )
                return await paced(chaos, [fault], LONG_PAUSE_S)

        return self.runner.run(scenario())

    def total(self, role: TargetRole, metric: Metric, label: str = "") -> float:
        """Return the sum of a counter over all processes of a role."""

        async def scenario() -> float:
            places = range(self.cluster.num_by_role[role])
            found = [await self.cluster.scrape(self.cluster.child(role, place)) for place in places]
            return sum(one.total(metric, label) for one in found)

        return self.runner.run(scenario())


async def paced(chaos: ChaosRun, faults: Sequence[Fault], pause_s: float) -> Report:
    """Run the faults under load, with pauses of the clients from then on."""

    def slow_down(progress: ChaosProgress) -> None:
        if progress.num_injected:
            chaos.load.pause_s = pause_s

    return await chaos.run(
        faults, faults[-1].at_s, asyncio.Event(), slow_down, max_delay_s=math.inf
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Share one cluster; each test leaves it healthy."""
    # The native kernels compute in bfloat16 in a third of the time.
    is_half = bool(kernels_by_variant())
    variant = VARIANTS["llama-bf16" if is_half else "llama"]
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "tiny", variant)
    kv_memory = "128KiB" if is_half else "256KiB"
    small = ("--kv-cache-memory", kv_memory, "--threads", "1")
    setting = ChaosClusterConfig(
        str(folder),
        node_arguments=small,
        clocks_jump=has_compiler(),
        disk_slows=has_compiler(),
        has_hostile_client=True,
        kv_host_memory=kv_memory,
    )
    with asyncio.Runner() as runner:
        cluster = runner.run(entered(setting))
        try:
            answers = runner.run(answers_of(cluster, NUM_ASKS, MAX_TOKENS))
            runner.run(cluster.begin())
            yield Running(runner, cluster, answers)
        finally:
            runner.run(cluster.__aexit__(None, None, None))


async def entered(setting: ChaosClusterConfig) -> ChaosCluster:
    return await ChaosCluster(setting).__aenter__()


async def answers_of(
    cluster: ChaosCluster, num_asks: int, max_tokens: int
) -> Sequence[KnownAnswer]:
    async with AsyncClient(cluster.address) as client:
        router = await cluster.router(client)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workload, "MAX_TOKENS", max_tokens)
            requests = await draw_requests(router, 0, num_asks)
        return await reference_answers(router, requests)


@pytest.mark.parametrize(("kind", "role"), FAULTS, ids=lambda one: one.value)
def test_faults_cause_no_wrong_or_lost_answer_and_no_leak(
    running: Running, kind: FaultKind, role: TargetRole
) -> None:
    if kind is FaultKind.JUMP and not has_compiler():
        pytest.skip("no C compiler builds a clock that jumps")
    phase = list(Phase)[FAULTS.index((kind, role)) % len(Phase)]
    fault = Fault(0, STRIKES_AT_S, kind, role, 0, phase, LASTS_S)

    switch = running.cluster.fault_switch(running.cluster.child(role, 0))
    num_hits = switch.num_hits

    kinds: set[str] = set()
    # Clients of a router that is killed lose what it has not answered, which can be all of a kind.
    for _ in range(MAX_TRIES if role is TargetRole.ROUTER else 1):
        report = running.through(fault)
        assert report.is_good, report
        assert report.num_faults == 1
        kinds |= report.num_by_kind.keys()
        if kinds & POOLED and kinds - POOLED:
            break

    assert kinds & POOLED
    assert kinds - POOLED
    assert (switch.num_hits > num_hits) is (kind in TRANSFER_FAULTS)


def test_corrupted_kv_is_detected_and_the_prompt_is_computed_on_decode(
    running: Running,
) -> None:
    report = running.until_counted(
        Fault(0, STRIKES_AT_S, FaultKind.CORRUPT, TargetRole.PREFILL, 0, Phase.SENT, LASTS_S),
        DIGEST_MISMATCHES,
    )

    assert report.counts["local"] > 0


def test_an_adapter_is_loaded_replaced_and_unloaded_while_requests_use_it(
    running: Running,
) -> None:
    report = running.through(
        Fault(0, STRIKES_AT_S, FaultKind.ADAPTERS, TargetRole.ROUTER, 0, Phase.SENT, 4.0)
    )

    assert report.is_good, report
    assert report.num_by_kind["reloaded"] > 0
    done = {one.what: one.count for one in report.evidence}
    assert done == {"adapter loads": 4, "adapter unloads": 1}


def test_an_overload_fills_the_caches(running: Running) -> None:
    answers = running.runner.run(answers_of(running.cluster, NUM_LONG_ASKS, workload.MAX_TOKENS))

    replace(running, answers=answers).until_counted(
        Fault(0, STRIKES_AT_S, FaultKind.OVERLOAD, TargetRole.ROUTER, 0, Phase.SENT, LASTS_S),
        PREEMPTIONS,
        pause_s=0.0,
    )


def test_streams_of_a_frozen_decode_node_migrate_and_the_node_is_used_again(
    running: Running,
) -> None:
    running.until_counted(
        Fault(0, STRIKES_AT_S, FaultKind.FREEZE, TargetRole.DECODE, 0, Phase.DECODING, LASTS_S),
        ATTEMPTS,
        MIGRATE,
        role=TargetRole.ROUTER,
        pause_s=LONG_PAUSE_S,
    )


def test_faults_of_files_and_objects_cause_no_wrong_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_load, "FILLING_S", 1.5)
    monkeypatch.setattr(tier_load, "MEASURED_S", 1.0)
    # The second fault resets the KV caches alone, so that all prompts are looked for in the tiers.
    first = (FaultKind.SPOIL, FaultKind.RESET)
    kinds = (*first, *sorted(TIER_FAULTS.difference(first), key=lambda kind: kind.value))
    faults = [
        Fault(number, STRIKES_AT_S + 0.4 * number, kind, TargetRole.ROUTER, 0, Phase.SENT, 0.4)
        for number, kind in enumerate(kinds)
    ]
    before = [running.total(role, TIER_TOKENS) for role in (TargetRole.PREFILL, TargetRole.DECODE)]

    report = running.through(*faults, pause_s=LONG_PAUSE_S)

    assert report.is_good, report
    assert report.counts["right"] > 0
    assert report.num_faults == len(TIER_FAULTS)
    after = [running.total(role, TIER_TOKENS) for role in (TargetRole.PREFILL, TargetRole.DECODE)]
    assert sum(after) > sum(before)


@pytest.mark.parametrize("attack", [Attack.DEAD_PEERS, Attack.KV_EVENTS, Attack.ADAPTERS])
def test_a_hostile_client_causes_no_wrong_answer_and_no_leak(
    running: Running, attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_processes, "ATTACK_LIMIT_S", 1.5)

    report = running.under(attack)

    assert not [*report.wrong, *report.hung, *report.lost, *report.leaks, *report.died], report
    assert report.counts["right"] > 0
    assert report.bystanders is not None
    assert report.bystanders.num_gaps > 0
    [worst] = report.bystanders.by_attack
    assert worst.attack == attack.value
    assert worst.outcomes
    assert ACCEPTED not in worst.outcomes
