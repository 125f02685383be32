"""Automatic size of the KV cache, a share of the free host memory."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.device import host_memory
from baton.engine.runner.device.device import MemoryProfile
from baton.engine.runner.device.host_memory import free_host_bytes
from baton.engine.runner.device.memory_profile import prompt_lengths
from baton.engine.runner.kv_budget import CacheShape, auto_kv_bytes, profiled_kv_bytes

GIB, MIB = 1 << 30, 1 << 20
NODE = RunnerConfig("m", kv_cache_share=None, max_num_seqs=128)
QWEN_BLOCK_BYTES = 28 * 2 * 8 * 128 * 2 * 16  # Qwen3-0.6B in bfloat16, 16 tokens
QWEN_LEN = 40_960
ONE_FULL = CacheLayout()
QWEN = CacheShape(QWEN_BLOCK_BYTES, QWEN_LEN, ONE_FULL)


@pytest.mark.parametrize(("nodes_per_machine", "share"), [(None, 1 / 4), (1, 1 / 2), (3, 1 / 6)])
def test_the_kv_cache_takes_its_share_of_free_memory(
    nodes_per_machine: int | None, share: float
) -> None:
    node = replace(NODE, nodes_per_machine=nodes_per_machine)

    num_bytes = auto_kv_bytes(node, 24 * GIB, QWEN)

    assert num_bytes == int(24 * GIB * share)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_adapters_of_all_nodes_are_left_free_and_the_rest_is_shared(num_nodes: int) -> None:
    node = replace(NODE, nodes_per_machine=num_nodes)

    num_bytes = auto_kv_bytes(node, 24 * GIB, QWEN._replace(adapter_bytes=2 * GIB))

    assert num_bytes == (24 - num_nodes * 2) * GIB // 2 // num_nodes


def test_adapters_without_room_leave_the_smallest_kv_cache() -> None:
    num_bytes = auto_kv_bytes(NODE, 4 * GIB, QWEN._replace(adapter_bytes=9 * GIB))

    assert num_bytes == 256 * MIB


def test_on_a_small_machine_the_kv_cache_is_256_mib_or_half_of_free_memory() -> None:
    small = replace(NODE, nodes_per_machine=8)

    assert auto_kv_bytes(small, GIB, QWEN) == 256 * MIB
    assert auto_kv_bytes(small, 100 * MIB, QWEN) == 50 * MIB


def test_the_kv_cache_is_limited_to_what_the_largest_batch_can_fill() -> None:
    assert auto_kv_bytes(NODE, 24 * GIB, CacheShape(32 << 10, 1000, ONE_FULL)) == 128 * 63 * (
        32 << 10
    )


def test_the_kv_cache_of_an_ordinary_machine_holds_a_full_context_of_a_small_model() -> None:
    num_bytes = auto_kv_bytes(NODE, 20 * GIB, QWEN)

    assert num_bytes // QWEN_BLOCK_BYTES * 16 > QWEN_LEN


# --- GPUs -----------------------------------------------------------------------------------------

GPU = replace(NODE, device="cuda", gpu_memory_utilization=0.75)


@pytest.mark.parametrize(
    ("nodes_per_machine", "free_gib", "expected_gib"),
    [
        (None, 70, 80 * 0.75 - 10 - 4),  # of the share
        (None, 30, 30 - 80 * 0.25 - 4),  # another process has 40 GiB
        (2, 70, 80 * 0.75 / 2 - 10 - 4),
    ],
)
def test_the_kv_cache_of_a_gpu_gets_what_weights_and_the_largest_step_leave(
    nodes_per_machine: int | None, free_gib: int, expected_gib: float
) -> None:
    node = replace(GPU, nodes_per_machine=nodes_per_machine)
    memory = MemoryProfile(80 * GIB, free_gib * GIB, 10 * GIB, 4 * GIB)

    num_bytes = profiled_kv_bytes(node, memory, QWEN)

    assert num_bytes == expected_gib * GIB


def test_the_kv_cache_of_a_gpu_leaves_room_for_adapters() -> None:
    memory = MemoryProfile(80 * GIB, 70 * GIB, 10 * GIB, 4 * GIB)

    num_bytes = profiled_kv_bytes(GPU, memory, QWEN._replace(adapter_bytes=3 * GIB))

    assert num_bytes == (60 - 10 - 4 - 3) * GIB
    with pytest.raises(InvalidConfig, match=r"adapters 50\.0 GiB.*lower max-cpu-loras, max-lo"):
        profiled_kv_bytes(GPU, memory, QWEN._replace(adapter_bytes=50 * GIB))


def test_a_gpu_without_room_for_a_kv_cache_is_refused() -> None:
    memory = MemoryProfile(16 * GIB, 4 * GIB, 11 * GIB, 2 * GIB)

    with pytest.raises(InvalidConfig, match=r"weights take 11\.0 GiB.*raise gpu-memory-util"):
        profiled_kv_bytes(GPU, memory, QWEN)


def test_the_kv_cache_of_a_gpu_is_limited_to_what_the_largest_batch_can_fill() -> None:
    memory = MemoryProfile(80 * GIB, 70 * GIB, 10 * GIB, 4 * GIB)

    assert profiled_kv_bytes(GPU, memory, CacheShape(32 << 10, 1000, ONE_FULL)) == 128 * 63 * (
        32 << 10
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_len", "expected"),
    [
        (2048, 4, 8191, [2045, 1, 1, 1]),
        (2048, 4, 1000, [1000, 1000, 47, 1]),
        (3, 8, 100, [1, 1, 1]),
        (2048, 2, 100, [100, 100]),
    ],
)
def test_the_largest_step_has_all_rows_and_prompts_as_long_as_possible(
    num_tokens: int, num_seqs: int, max_len: int, expected: list[int]
) -> None:
    assert prompt_lengths(num_tokens, num_seqs, max_len) == expected


# --- what is free ---------------------------------------------------------------------------------

MEMINFO = "MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"  # 8 GiB


def machine(root: Path, group: str = "0::/\n", **files: str) -> Path:
    """Write files below sys/fs/cgroup, with __ for slashes and _dot_ for dots in their paths."""
    written = {"proc/meminfo": MEMINFO, "proc/self/cgroup": group}
    written |= {
        f"sys/fs/cgroup/{name.replace('__', '/').replace('_dot_', '.')}": text
        for name, text in files.items()
    }
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> set[mmap.mmap]:
    """Return what counts as the mapped files of this process, empty for now."""
    files: set[mmap.mmap] = set()
    monkeypatch.setattr(host_memory, "_mapped_files", files)
    return files


def test_mapped_files_count_as_used(tmp_path: Path, mapped: set[mmap.mmap]) -> None:
    """They are page cache, which is active or not, and would count as free."""
    mapped.add(mmap.mmap(-1, GIB))
    stat = f"inactive_file {GIB // 2}\nactive_file {GIB // 2}\n"
    limits = {"memory_dot_current": f"{3 * GIB}\n", "memory_dot_stat": stat}

    small = machine(tmp_path / "small", memory_dot_max=f"{4 * GIB}\n", **limits)
    large = machine(tmp_path / "large", memory_dot_max=f"{64 * GIB}\n", **limits)

    assert free_host_bytes(small) == GIB
    assert free_host_bytes(large) == 7 * GIB


def test_without_a_cgroup_limit_free_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    no_limit = machine(tmp_path, memory_dot_max="max\n", memory_dot_current="5\n")

    assert free_host_bytes(no_limit) == 8 * GIB


def test_reclaimable_page_cache_counts_as_free(tmp_path: Path) -> None:
    container = machine(
        tmp_path,
        memory_dot_max=f"{4 * GIB}\n",
        memory_dot_current=f"{3 * GIB}\n",
        memory_dot_stat=f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 7\n",
    )

    assert free_host_bytes(container) == 3 * GIB


def test_the_lowest_limit_of_nested_cgroups_applies(tmp_path: Path) -> None:
    nested = machine(
        tmp_path,
        "0::/outer/inner\n",
        outer__memory_dot_max=f"{2 * GIB}\n",
        outer__memory_dot_current="0\n",
        outer__inner__memory_dot_max=f"{3 * GIB}\n",
        outer__inner__memory_dot_current="0\n",
    )

    assert free_host_bytes(nested) == 2 * GIB


def test_a_cgroup_v1_limit_applies(tmp_path: Path) -> None:
    old = machine(
        tmp_path,
        "9:cpu:/\n4:memory:/here\n0::/\n",
        memory__memory_dot_limit_in_bytes=f"{(1 << 63) - 4096}\n",
        memory__memory_dot_usage_in_bytes="7\n",
        memory__here__memory_dot_limit_in_bytes=f"{2 * GIB}\n",
        memory__here__memory_dot_usage_in_bytes=f"{GIB}\n",
        memory__here__memory_dot_stat=f"total_inactive_file {GIB // 2}\n",
    )

    assert free_host_bytes(old) == GIB + GIB // 2
