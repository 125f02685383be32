"""Heavy use of tiers in a chaos run: second turns, evidence, the slow disk and the tiers' CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import slow_disk
from benchmarks.chaos.faults import Fault, FaultKind, InjectedFault, Phase, TargetRole
from benchmarks.chaos.hostile.bystander import ObservedWait, Wait
from benchmarks.chaos.hostile.latencies import bystander_latencies
from benchmarks.chaos.preloading import has_compiler, preload
from benchmarks.chaos.report import MAX_TIERS_CPU, TIERS_CPU, Attempts, Report, report
from benchmarks.chaos.s3_server import S3Server
from benchmarks.chaos.second_turns import LoadsRow, ProbedTurn, loads_rows, skipped_loads
from benchmarks.chaos.tier_threads import cpu_s, tier_threads_s

TOKEN_BYTES = 100e3


def injected(kind: FaultKind, at_s: float = 10.0, recovered_s: float = 12.0) -> InjectedFault:
    fault = Fault(0, at_s, kind, TargetRole.ROUTER, 0, Phase.SENT, 1.0)
    return InjectedFault(fault, "router", at_s, recovered_s=recovered_s)


def probed(
    loaded_tokens: int = 512,
    *,
    kind: FaultKind = FaultKind.LOADS,
    began_s: float = 100.0,
    found_tokens: int = 0,
    computed_s: float = 1.0,
) -> ProbedTurn:
    prefix = (540, 512, found_tokens, loaded_tokens)
    return ProbedTurn(kind, began_s, began_s + 5.0, *prefix, computed_s, 0.1, is_right=True)


def reported(*faults: InjectedFault, loads: tuple[LoadsRow, ...] = ()) -> Report:
    return report((), faults, Attempts(), elapsed_s=60, leaks=(), died=(), loads=loads)


def test_skipped_profitable_loads_fail_a_run() -> None:
    turns = [probed() for _ in range(9)] + [probed(loaded_tokens=0)]

    [row] = loads_rows(turns, [], TOKEN_BYTES)
    found = reported(loads=(row,))

    assert (row.kind, row.turns, row.profitable, row.taken) == ("loads", 10, 10, 0.9)
    assert found.counts["missed bounds"] == 1
    [missed] = found.missed
    assert "90% of 10 profitable loads" in missed
    assert not found.is_good
    assert skipped_loads(turns, [], TOKEN_BYTES) == turns[-1:]


def test_second_turns_during_other_faults_do_not_count() -> None:
    turns = [probed(), probed(loaded_tokens=0, began_s=12.0)]
    faults = [injected(FaultKind.KILL), injected(FaultKind.LOADS, 95.0, 110.0)]

    [row] = loads_rows(turns, faults, TOKEN_BYTES)

    assert (row.turns, row.next_to_faults, row.profitable, row.taken) == (2, 1, 1, 1.0)
    assert not skipped_loads(turns, faults, TOKEN_BYTES)


def test_second_turns_computed_on_a_node_without_tiers_are_counted_separately() -> None:
    [row] = loads_rows([replace(probed(0), can_load=False), probed()], [], TOKEN_BYTES)

    assert (row.turns, row.without_tiers, row.profitable, row.taken) == (2, 1, 1, 1.0)


def test_a_fault_kind_without_second_turns_fails_a_run() -> None:
    [row] = loads_rows([], [injected(FaultKind.TENANTS)], TOKEN_BYTES)

    [missed] = reported(loads=(row,)).missed

    assert missed == "no second turn was measured; during: tenants"


@pytest.mark.parametrize(
    "turn",
    [
        probed(loaded_tokens=0, computed_s=0.01),
        probed(loaded_tokens=0, found_tokens=512),
    ],
)
def test_prefixes_that_are_cached_or_faster_to_compute_need_no_load(turn: ProbedTurn) -> None:
    [row] = loads_rows([turn], [], TOKEN_BYTES)

    assert (row.profitable, row.is_within) == (0, True)


def test_results_of_a_fault_kind_are_summed_and_worst_values_are_maxima() -> None:
    one, other = (injected(FaultKind.SLOW_DISK) for _ in range(2))
    one.evidence = {"files delayed": 3, TIERS_CPU: MAX_TIERS_CPU + 0.1}
    other.evidence = {"files delayed": 4, TIERS_CPU: 0.1}

    found = reported(one, other)

    assert {(each.fault, each.what): each.count for each in found.evidence} == {
        ("slow-disk", "files delayed"): 7,
        ("slow-disk", TIERS_CPU): MAX_TIERS_CPU + 0.1,
    }
    [missed] = found.missed
    assert "tiers used 0.35 of a core" in missed


def test_a_flooding_tenant_must_not_slow_down_bystanders() -> None:
    flood = injected(FaultKind.TENANTS)
    flood.attack = FaultKind.TENANTS.value
    gap = ObservedWait(Wait.GAP.value, 10.5, 12.0)

    found = bystander_latencies([gap], {}, [flood])

    [missed] = found.missed
    assert "gap of 1.50 s" in missed
    assert "tenants" in missed


def test_a_bucket_with_a_size_limit_drops_its_oldest_objects() -> None:
    server = S3Server(max_objects=2)

    for key in ("a", "b", "a", "c"):
        server.put(key, key.encode())

    assert list(server.objects) == ["a", "c"]


RENAME = "import os, sys, time; began = time.monotonic(); os.rename(*sys.argv[1:]); "
RENAME += "print(time.monotonic() - began)"


@pytest.mark.skipif(not has_compiler(), reason="no C compiler builds the library")
def test_a_slow_disk_delays_and_counts_operations_on_kv_files_only(tmp_path: Path) -> None:
    disk = slow_disk.build(tmp_path)
    environment = {**os.environ, **preload([disk])}

    def rename(name: str) -> float:
        (tmp_path / "part").touch()
        command = [sys.executable, "-c", RENAME, str(tmp_path / "part"), str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    with disk.slow(0.2):
        slow_s, _ = rename("block.kv"), rename("journal")
    rename("later.kv")

    assert slow_s >= 0.2
    assert disk.num_delayed == 1


def test_the_cpu_time_of_a_thread_is_the_sum_of_user_and_system_time() -> None:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    line = "7 (kv host (x)) S 1 7 7 0 -1 4194304 10 0 0 0 30 12 0 0 20 0 1 0 5 6 7"

    assert cpu_s(line) == pytest.approx(42 * tick_s)
    assert tier_threads_s(os.getpid()) == 0.0
