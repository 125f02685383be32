"""Host memory that this process can still allocate, within its cgroup limits. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes no limit as a number near 2**63


def free_host_bytes(root: Path = ROOT) -> int:
    """Return the minimum of MemAvailable and the free memory of each cgroup of this process.

    `root` is the folder under which proc and sys are mounted.
    """
    available = _kib((root / "proc/meminfo").read_text(encoding="ascii"), "MemAvailable:") * 1024
    return min([available, *_free_in_cgroups(root)])


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the free memory of each cgroup (v2 and v1), from the root down to this process's.

    In a container the mount often starts at the container's own cgroup, while /proc/self/cgroup
    shows another path: missing folders are skipped.
    """
    version_2, version_1 = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    for folder in _down_to(version_2, _own_cgroup(root, "")):
        yield from _free_in_cgroup(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _down_to(version_1, _own_cgroup(root, "memory")):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from _free_in_cgroup(folder, *names)


def _own_cgroup(root: Path, controller: str) -> str:
    """Return this process's cgroup path for `controller`; an empty controller means cgroup v2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _down_to(mount: Path, path: str) -> Iterator[Path]:
    folder = mount
    yield folder
    for name in filter(None, path.split("/")):
        folder = folder / name
        yield folder


def _free_in_cgroup(
    folder: Path, limit_file: str, used_file: str, cache_name: str
) -> Iterator[int]:
    """Yield the free memory of a cgroup, if it has a limit. Inactive page cache counts as free."""
    limit, used = _text(folder / limit_file), _text(folder / used_file)
    if not (limit.isdecimal() and used.isdecimal()) or int(limit) >= NO_LIMIT_BYTES:
        return
    cache = re.search(rf"^{cache_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    yield max(int(limit) - int(used) + (int(cache[1]) if cache else 0), 0)


def _kib(meminfo: str, name: str) -> int:
    line = next(line for line in meminfo.splitlines() if line.startswith(name))
    return int(line.split()[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
