"""Automatic size of the KV cache, a share of the free host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.attention.kv_budget import auto_kv_bytes
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.host_memory import free_host_bytes

GIB, MIB = 1 << 30, 1 << 20
NODE = RunnerConfig("m", kv_cache_share=None, max_num_seqs=128)
QWEN_BLOCK_BYTES = 28 * 2 * 8 * 128 * 2 * 16  # Qwen3-0.6B in bfloat16, 16 tokens
QWEN_LEN = 40_960
ONE_FULL = CacheLayout()


@pytest.mark.parametrize(
    ("device", "nodes_per_machine", "share"),
    [("cpu", None, 1 / 4), ("cpu", 1, 1 / 2), ("cpu", 3, 1 / 6), ("cuda:0", None, 0.8)],
)
def test_the_kv_cache_takes_its_share_of_free_memory(
    device: str, nodes_per_machine: int | None, share: float
) -> None:
    node = replace(NODE, device=device, nodes_per_machine=nodes_per_machine)

    num_bytes = auto_kv_bytes(node, 24 * GIB, QWEN_BLOCK_BYTES, QWEN_LEN, ONE_FULL)

    assert num_bytes == int(24 * GIB * share)


def test_on_a_small_machine_the_kv_cache_is_256_mib_or_half_of_free_memory() -> None:
    small = replace(NODE, nodes_per_machine=8)

    assert auto_kv_bytes(small, GIB, QWEN_BLOCK_BYTES, QWEN_LEN, ONE_FULL) == 256 * MIB
    assert auto_kv_bytes(small, 100 * MIB, QWEN_BLOCK_BYTES, QWEN_LEN, ONE_FULL) == 50 * MIB


def test_the_kv_cache_is_limited_to_what_the_largest_batch_can_fill() -> None:
    assert auto_kv_bytes(NODE, 24 * GIB, 32 << 10, 1000, ONE_FULL) == 128 * 63 * (32 << 10)


def test_the_kv_cache_of_an_ordinary_machine_holds_a_full_context_of_a_small_model() -> None:
    num_bytes = auto_kv_bytes(NODE, 20 * GIB, QWEN_BLOCK_BYTES, QWEN_LEN, ONE_FULL)

    assert num_bytes // QWEN_BLOCK_BYTES * 16 > QWEN_LEN


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
