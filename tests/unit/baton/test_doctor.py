"""Findings of `baton doctor` from what it reads."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest
import torch

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.units import format_bytes
from baton.demo_model import demo_model
from baton.doctor.collectives import check_collectives, collectives_finding
from baton.doctor.findings import Finding, Status, folder_finding
from baton.doctor.machine import (
    Limits,
    cores_finding,
    cpu_finding,
    files_finding,
    locked_memory_finding,
    memory_finding,
    numa_finding,
    ptrace_finding,
    rdma_devices,
    read_limits,
    shm_finding,
)
from baton.doctor.model import (
    AdapterRoom,
    check_model_folder,
    count_active,
    length_finding,
    room_finding,
)
from baton.doctor.software import (
    device_memory_finding,
    gpu_finding,
    kernels_finding,
    package_findings,
    port_findings,
)
from baton.doctor.tiers import KvShapeFacts, check_tiers, rate_finding
from baton.doctor.wire import MeasuredPath, failure_finding, speed_finding
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.build import best_variant, cpu_features, library
from baton.kv_transfer.external_kv import FILE, OBJECT
from tests.support.gguf_files import write_gguf
from tests.support.random_folders import small_folder

GIB, MIB = 1 << 30, 1 << 20
NO_LIMITS = Limits(None, None)


def tree(root: Path, **files: str) -> Path:
    """Write files, named by path with __ for each slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("flags", "status", "found"),
    [
        ("fpu avx2 avx512f amx_tile", Status.OK, "avx2, avx512f, amx_tile"),
        ("fpu sse2", Status.WARN, "no wide vectors"),
    ],
)
def test_the_cpu_status_follows_its_vector_extensions(
    flags: str, status: Status, found: str
) -> None:
    finding = cpu_finding(f"processor : 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n")

    assert finding.status is status
    assert finding.found == f"Some CPU; {found}"


def test_an_arm_cpu_is_identified_by_its_features() -> None:
    assert cpu_finding("Features\t: fp asimd bf16\n").status is Status.OK


def test_a_cpu_limit_is_reported_with_the_recommended_threads() -> None:
    finding = cores_finding(8, 8, Limits(2.5, None))

    assert finding.status is Status.WARN
    assert "--threads 2" in finding.advice
    assert cores_finding(8, 8, Limits(8.0, None)).status is Status.OK
    assert cores_finding(1, 8, NO_LIMITS).status is Status.WARN


def test_cgroup_limits_are_read_in_versions_1_and_2(tmp_path: Path) -> None:
    new = tree(
        tmp_path / "2",
        **{"sys__fs__cgroup__cpu.max": "150000 100000\n", "sys__fs__cgroup__memory.max": "1024\n"},
    )
    free = tree(
        tmp_path / "free",
        **{"sys__fs__cgroup__cpu.max": "max 100000\n", "sys__fs__cgroup__memory.max": "max\n"},
    )
    old = tree(
        tmp_path / "1",
        **{
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "50000",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712",
        },
    )

    assert read_limits(new) == Limits(1.5, 1024)
    assert read_limits(free) == NO_LIMITS
    assert read_limits(old) == Limits(0.5, None)
    assert read_limits(tmp_path / "none") == NO_LIMITS


def test_available_memory_respects_the_cgroup_limit() -> None:
    meminfo = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"

    assert memory_finding(meminfo, NO_LIMITS) == Finding(
        "memory", Status.OK, "8.0 GiB available of 16.0 GiB"
    )
    assert memory_finding(meminfo, Limits(None, GIB)).status is Status.WARN


def test_numa_nodes_are_reported_with_their_cores(tmp_path: Path) -> None:
    nodes = {
        f"sys__devices__system__node__node{n}__cpulist": f"{n * 4}-{n * 4 + 3}" for n in (0, 1)
    }

    finding = numa_finding(tree(tmp_path, **nodes))

    assert finding.found == "2 memory nodes: node0 0-3, node1 4-7"
    assert "--cpus" in finding.advice
    assert "--tensor-parallel-size 2" in finding.advice


def test_slow_sums_between_processes_are_a_warning() -> None:
    assert collectives_finding(3.1e-6).status is Status.OK
    slow = collectives_finding(4e-4)

    assert slow.found == "two processes add up 4096 bytes in 400.0 µs (median)"
    assert slow.status is Status.WARN
    assert "--tensor-parallel-size" in slow.advice


def test_sums_between_processes_are_measured() -> None:
    library(best_variant(cpu_features()))  # built, as in a node
    [finding] = check_collectives()

    assert finding.status is not Status.FAIL


def test_low_limits_are_warnings_only_if_a_component_needs_more(tmp_path: Path) -> None:
    devices = rdma_devices(tree(tmp_path, sys__class__infiniband__mlx5_0=""))

    assert devices == ["mlx5_0"]
    assert locked_memory_finding(64 * 1024, devices).status is Status.WARN
    assert locked_memory_finding(resource.RLIM_INFINITY, devices).status is Status.OK
    assert locked_memory_finding(64 * 1024, []).status is Status.OK
    assert shm_finding(64 * MIB, 64 * MIB).status is Status.WARN
    assert shm_finding(2 * GIB, GIB).status is Status.OK
    assert files_finding(256).status is Status.WARN
    assert files_finding(resource.RLIM_INFINITY).status is Status.OK
    assert ptrace_finding("1").status is Status.WARN
    assert ptrace_finding("").status is Status.OK


@pytest.mark.parametrize(
    ("names", "has_driver", "torch_cuda", "status"),
    [
        (["H200"], True, "12.8", Status.OK),
        ([], False, None, Status.OK),
        ([], True, None, Status.WARN),
        ([], True, "12.8", Status.WARN),
    ],
)
def test_an_unusable_gpu_is_reported(
    names: list[str], has_driver: bool, torch_cuda: str | None, status: Status
) -> None:
    assert gpu_finding(names, has_driver=has_driver, torch_cuda=torch_cuda).status is status


def test_without_a_compiler_kernels_must_be_prebuilt() -> None:
    built = kernels_finding("avx2", Path("/cache/x.so"), None)

    assert (built.status, built.found) == (Status.OK, "avx2, in /cache")
    assert kernels_finding("avx2", None, "/usr/bin/c++").status is Status.OK
    missing = kernels_finding("avx2", None, None)
    assert missing.status is Status.WARN
    assert "torch is used, which gives other tokens" in missing.advice


def test_missing_nixl_is_a_failure_and_missing_ucxx_is_not() -> None:
    assert [one.status for one in package_findings(None, None)] == [Status.FAIL, Status.OK]
    assert [one.status for one in package_findings("1.5", "0.52")] == [Status.OK, Status.OK]


def test_staging_of_the_kv_of_gpus_is_reported() -> None:
    staged = device_memory_finding(has_cuda=False)

    assert (staged.status, "pinned host memory" in staged.found) == (Status.WARN, True)
    assert device_memory_finding(has_cuda=True).status is Status.OK


def test_a_busy_port_is_a_warning_and_a_free_port_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [busy] = port_findings("127.0.0.1", [port])
    [free] = port_findings("127.0.0.1", [port])

    assert (busy.status, free.status) == (Status.WARN, Status.OK)


def test_the_default_transport_must_work_and_others_may_not() -> None:
    assert failure_finding("nixl", "x").status is Status.FAIL
    assert failure_finding("ucxx", "x").status is Status.WARN
    assert speed_finding(MeasuredPath("nixl", ""), 5.0).status is Status.OK
    assert speed_finding(MeasuredPath("nixl", ""), 0.01).status is Status.WARN


def test_a_model_needs_room_for_its_weights_and_its_kv_in_each_node() -> None:
    assert room_finding(4 * GIB, GIB, 1024, 16 * GIB).status is Status.OK
    assert room_finding(4 * GIB, GIB, 1024, 8 * GIB).status is Status.WARN
    assert room_finding(4 * GIB, GIB, 1024, 4 * GIB).status is Status.FAIL
    assert "1024 bytes a token, 1048576 tokens" in room_finding(1, GIB, 1024, GIB).found
    assert "up to 5.5 GiB for evicted KV" in room_finding(4 * GIB, GIB, 1024, 16 * GIB).found
    short = room_finding(4 * GIB, GIB, 1024, 16 * GIB, adapter_bytes=12 * GIB)
    assert short.status is Status.FAIL
    assert "up to 12.0 GiB of LoRA adapters" in short.found
    assert "max-cpu-loras" in short.advice


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_the_room_of_a_model_counts_the_adapters_of_all_places(
    tmp_path: Path, kernels: str
) -> None:
    """Adapters for Triton kernels have no routers of their own, which can be larger."""
    small_folder(tmp_path, "qwen3-30b-a3b", num_hidden_layers=1, num_experts=32)
    room = AdapterRoom(num_places=512, max_rank=8, kernels=kernels)
    found = {one.check: one for one in check_model_folder(str(tmp_path), 4 * MIB, adapters=room)}

    places = AdapterPlaces(read_model_config(SafetensorsFolder(tmp_path)))
    merged, unmerged = (
        512 * places.max_bytes(8, torch.float32, merges_routers=merges) for merges in (True, False)
    )
    assert format_bytes(merged) != format_bytes(unmerged)
    num_bytes = unmerged if kernels == "triton" else merged
    assert f"up to {format_bytes(num_bytes)} of LoRA adapters" in found["room"].found


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    fine = folder_finding("traces", tmp_path / "not" / "yet" / "there", "name another")
    bad = folder_finding("traces", tmp_path / "file" / "below", "name another")
    readless = folder_finding("traces", Path("/proc/traces"), "name another")  # for root, too

    assert (fine.status, bad.status, readless.status) == (Status.OK, Status.WARN, Status.WARN)
    assert "is not a folder" in bad.found
    assert "cannot be written to" in readless.found
    assert not (tmp_path / "not").exists()


def test_kernels_need_a_writable_build_folder(tmp_path: Path) -> None:
    nowhere = kernels_finding("avx2", None, "/usr/bin/c++", Path("/proc/kernels"))
    somewhere = kernels_finding("avx2", None, "/usr/bin/c++", tmp_path / "kernels")

    assert (nowhere.status, somewhere.status) == (Status.WARN, Status.OK)
    assert "BATON_KERNELS" in nowhere.advice


def test_a_latent_cache_takes_one_key_per_token_and_layer(tmp_path: Path) -> None:
    small_folder(tmp_path, "deepseek-v2-lite")
    found = {one.check: one.found for one in check_model_folder(str(tmp_path), 4 * MIB)}

    assert f"({2 * (32 + 8) * 4} bytes a token" in found["room"]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ('{"temperature": 0.6, "top_k": 20}', "temperature 0.6, top_k 20"),
        ("{}", "the model recommends nothing: temperature 1"),
    ],
)
def test_the_sampling_parameters_that_a_model_recommends_are_shown(
    tmp_path: Path, generation: str, expected: str
) -> None:
    small_folder(tmp_path, "qwen3-30b-a3b", num_experts=8)
    (tmp_path / "generation_config.json").write_text(generation)
    found = {one.check: one.found for one in check_model_folder(str(tmp_path), 4 * MIB)}

    assert found["sampling"] == expected


def test_a_gguf_file_that_recommends_no_sampling_parameters_is_shown_with_those_assumed(
    tmp_path: Path,
) -> None:
    file = write_gguf(Path(demo_model()), tmp_path / "model.gguf").path
    found = {one.check: one.found for one in check_model_folder(str(file), 4 * MIB)}

    assert found["sampling"].startswith("temperature 0.8, top_p 0.95, min_p 0.05: llama.cpp's")


def test_a_kv_cache_smaller_than_the_model_context_is_a_warning() -> None:
    short = length_finding(18_720, 40_960)

    assert short.status is Status.WARN
    assert "may have 18721 tokens together; the model takes 40960" in short.found
    assert length_finding(40_960, 40_960).status is Status.OK


def test_an_moe_model_is_reported_with_its_active_parameters(tmp_path: Path) -> None:
    small_folder(tmp_path, "qwen3-30b-a3b", num_experts=8, num_experts_per_tok=2)
    found = {one.check: one.found for one in check_model_folder(str(tmp_path), 4 * MIB)}

    # Embeddings, head and final norm; norms, attention, router and eight experts of two layers.
    attention = 2 * 64 * 32 * (4 + 2)
    layer = 2 * 64 + 2 * 32 + attention + 8 * 64
    expert = 3 * 32 * 64
    total, active = (2 * 300 * 64 + 64 + 2 * (layer + count * expert) for count in (8, 2))
    assert found["weights"] == (
        f"Qwen3MoeForCausalLM, {total:,} parameters of which a token uses {active:,} "
        "(2 of 8 experts) in float32; runs on Baton's own layers"
    )


def test_biases_of_idle_experts_are_not_active(tmp_path: Path) -> None:
    config = read_model_config(SafetensorsFolder(small_folder(tmp_path, "gpt-oss-20b")))

    idle = 2 * 6 * (3 * 96 * 64 + 2 * 96 + 64)
    assert count_active(config, 1_000_000) == 1_000_000 - idle


def test_a_slow_tier_is_reported_with_its_effect_on_loads() -> None:
    kv = KvShapeFacts("some-model", 1_000_000, 16)

    fast = rate_finding("file tier", "reads 1 GB/s", 1e9, kv)
    slow = rate_finding("file tier", "reads 0.01 GB/s", 1e7, kv)

    assert fast.status is Status.OK
    assert fast.found.startswith("reads 1 GB/s: 16,000 tokens/s of some-model, ")
    assert "8,192 tokens in 0.51 s" in fast.found
    assert slow.status is Status.WARN
    assert "compute more slowly" in slow.advice


def test_an_unusable_folder_and_an_unusable_bucket_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    path = tmp_path / "file"
    path.touch()

    found = {
        finding.check: finding
        for finding in check_tiers(
            {FILE: str(path), OBJECT: "s3://bucket/kv"}, KvShapeFacts("small", 4096, 16)
        )
    }

    assert found["host tier"].status is Status.OK
    assert found["file tier"].status is Status.FAIL
    assert "Not a directory" in found["file tier"].found
    assert found["object tier"].status is Status.FAIL
    assert "127.0.0.1:1" in found["object tier"].found
