"""Checks of the machine: CPU, memory, and limits of the container."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.core.units import GIB, format_bytes
from baton.doctor.findings import Finding, ok, warn

VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
MIN_SHM_BYTES = 256 << 20  # Docker's default is 64 MiB
MIN_OPEN_FILES = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of the container; None means unlimited."""

    num_cpus: float | None
    memory_bytes: int | None


def check_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the machine. `root` contains proc and sys."""
    limits = read_limits(root)
    cores = os.sched_getaffinity(0)
    yield cpu_finding((root / "proc/cpuinfo").read_text(encoding="utf-8"))
    yield cores_finding(len(cores), os.cpu_count() or len(cores), limits)
    yield numa_finding(root)
    yield memory_finding((root / "proc/meminfo").read_text(encoding="utf-8"), limits)
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        yield shm_finding(usage.total, usage.free)
    # Processes raise their soft limit to the hard one.
    yield files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield locked_memory_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma_devices(root))
    yield ptrace_finding(_text(root / "proc/sys/kernel/yama/ptrace_scope"))


def cpu_finding(cpuinfo: str) -> Finding:
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    supported = set(flags[1].split()) if flags else set()
    known = [flag for flag in VECTOR_FLAGS if flag in supported]
    found = f"{name[1] if name else 'unknown'}; {', '.join(known) or 'no wide vectors'}"
    if {"avx2", "asimd"} & supported:
        return ok("CPU", found)
    return warn("CPU", found, "without AVX2 torch is slow; use another machine")


def cores_finding(num_usable: int, num_all: int, limits: Limits) -> Finding:
    found = f"{num_usable} of {num_all} cores usable"
    quota = limits.num_cpus
    if quota is not None and quota < num_usable:
        return warn(
            "cores",
            f"{found}, for {quota:g} cores' worth of time",
            f"start nodes with --threads {max(1, int(quota))}: more threads than the quota allows "
            "stall each other",
        )
    if num_usable < 2:
        return warn("cores", found, "router, prefill and decode share one core; give it more")
    return ok("cores", found)


def numa_finding(root: Path) -> Finding:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return ok("NUMA", "one memory node")
    lists = ", ".join(f"{node.name} {_text(node / 'cpulist')}" for node in nodes)
    advice = (
        "keep each node on one memory node with --cpus, or give it a process on each with "
        f"--tensor-parallel-size {len(nodes)}"
    )
    return warn("NUMA", f"{len(nodes)} memory nodes: {lists}", advice)


def memory_finding(meminfo: str, limits: Limits) -> Finding:
    lines = re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)
    sizes = {name: int(kib) * 1024 for name, kib in lines}
    available = sizes.get("MemAvailable", 0)
    found = f"{format_bytes(available)} available of {format_bytes(sizes.get('MemTotal', 0))}"
    if limits.memory_bytes is not None:
        available = min(available, limits.memory_bytes)
        found += f", the container's limit is {format_bytes(limits.memory_bytes)}"
    if available < 2 * GIB:
        return warn("memory", found, "use a small model and a small --kv-cache-memory")
    return ok("memory", found)


def shm_finding(total_bytes: int, free_bytes: int) -> Finding:
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes < MIN_SHM_BYTES:
        advice = "UCX passes KV through it; give the container more: --shm-size 1g"
        return warn("/dev/shm", found, advice)
    return ok("/dev/shm", found)


def files_finding(limit: int) -> Finding:
    if 0 <= limit < MIN_OPEN_FILES:
        advice = f"raise it: ulimit -n {MIN_OPEN_FILES * 64}; each client and each peer takes some"
        return warn("open files", f"at most {limit}", advice)
    return ok("open files", _limit(limit, str(limit)))


def locked_memory_finding(limit: int, devices: list[str]) -> Finding:
    found = _limit(limit, format_bytes(limit))
    if not devices:
        return ok("locked memory", f"{found}; no RDMA device needs it")
    found += f"; RDMA: {', '.join(devices)}"
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", found)
    advice = "RDMA locks the whole KV cache: ulimit -l unlimited, or --ulimit memlock=-1"
    return warn("locked memory", found, advice)


def ptrace_finding(scope: str) -> Finding:
    """Check that Yama allows cross-memory attach (CMA) between processes."""
    if scope in ("", "0"):
        return ok("CMA", "processes of one user can copy from each other")
    advice = "KV takes a slower way between processes; sysctl kernel.yama.ptrace_scope=0 allows it"
    return warn("CMA", f"kernel.yama.ptrace_scope is {scope}", advice)


def rdma_devices(root: Path) -> list[str]:
    return sorted(device.name for device in (root / "sys/class/infiniband").glob("*"))


def read_limits(root: Path) -> Limits:
    """Return the limits of this process's cgroup, version 2 or 1, as mounted in the container."""
    cgroup = root / "sys/fs/cgroup"
    cgroup_v2 = (cgroup / "cpu.max", cgroup / "memory.max")
    if any(path.exists() for path in cgroup_v2):
        quota, _, period = _text(cgroup_v2[0]).partition(" ")
        return Limits(_cpu_quota(quota, period), _bytes(_text(cgroup_v2[1])))
    folder = cgroup / "cpu"
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return Limits(_cpu_quota(quota, period), _bytes(_text(cgroup / "memory/memory.limit_in_bytes")))


def _cpu_quota(quota: str, period: str) -> float | None:
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None  # "max", or -1, or no such file
    return int(quota) / int(period)


def _bytes(written: str) -> int | None:
    """Parse a memory limit. Version 1 writes 'no limit' as a number close to 2**63."""
    return int(written) if written.isdecimal() and int(written) < 1 << 60 else None


def _limit(limit: int, shown: str) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"at most {shown}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
