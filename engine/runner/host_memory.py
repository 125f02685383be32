"""Host memory that a process may still allocate, its cgroups' limits included. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes no limit as a number near 2**63


def free_host_bytes(root: Path = ROOT) -> int:
    """The smallest of the machine's MemAvailable and what each cgroup above this process leaves.

    `root` is where proc and sys are mounted.
    """
    available = _kib((root / "proc/meminfo").read_text(encoding="ascii"), "MemAvailable:") * 1024
    return min([available, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Of version 2 and version 1, from the root of the hierarchy down to this process's group.

    In a container the mount often starts at the container's own group, whose path this process
    sees as another one: folders that are not there are skipped.
    """
    version_2, version_1 = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    for folder in _down_to(version_2, _own_group(root, "")):
        yield from _left(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _down_to(version_1, _own_group(root, "memory")):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from _left(folder, *names)


def _own_group(root: Path, controller: str) -> str:
    """Path of this process's cgroup in the hierarchy of that controller; empty: version 2."""
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


def _left(folder: Path, limit_file: str, used_file: str, cache_name: str) -> Iterator[int]:
    """Nothing without a limit. Page cache that can be dropped does not count as used."""
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
