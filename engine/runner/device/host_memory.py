"""Memory of the machine: how much is free, on which pages it is, and how it is given back.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakSet

ROOT = Path("/")
TRIM_INTERVAL = 256 << 20  # loaded bytes
MADV_POPULATE_READ = 22  # of Linux 5.14; Python has no name for it
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes no limit as a number near 2**63

_mapped_files = WeakSet[mmap.mmap]()  # by `map_file`


def free_host_bytes(root: Path = ROOT) -> int:
    """Return the minimum of MemAvailable and the free memory of each cgroup of this process.

    Mapped files count as used, although the kernel could drop their pages. `root` is the folder
    under which proc and sys are mounted.
    """
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    [available_kib] = re.findall(r"^MemAvailable: *(\d+)", meminfo, re.MULTILINE)
    mapped_bytes = sum(map(len, _mapped_files))
    available_bytes = max(0, int(available_kib) * 1024 - mapped_bytes)
    return min([available_bytes, *_free_in_cgroups(root, mapped_bytes)])


def huge_page_memory(num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` of zeroed memory, on huge pages where the machine supports them.

    The kernel allocates it on first access. A copy between two processes (CMA) costs kernel work
    for every page, and reading block by block costs a TLB entry for each page. With 4 KiB pages
    this costs more than the copy itself.

    The mapping is private: huge pages of shared memory have their own setting, which is off by
    default on nearly all systems.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def map_file(file: BinaryIO) -> mmap.mmap:
    """Map a whole file that nobody writes. All processes that map it share its pages.

    They are found at once where the kernel supports that, and at each first use otherwise.
    """
    memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)  # writable, as torch wants it
    with suppress(OSError):
        memory.madvise(MADV_POPULATE_READ)
    _mapped_files.add(memory)
    return memory


class HeapTrimmer:
    """Returns freed memory to the system while weights are loaded, by trimming the heap of glibc.

    Buffers of matrices are aligned, and glibc does not reuse the place of an aligned buffer for
    another one of that size if small objects lie around it: without trimming, the free places add
    up to half of the model.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._trim = libc.malloc_trim if hasattr(libc, "malloc_trim") else None
        self._loaded = 0

    def count(self, num_bytes: int) -> None:
        """Count loaded bytes, and trim the heap at each interval."""
        self._loaded += num_bytes
        if self._loaded >= TRIM_INTERVAL and self._trim is not None:
            self._loaded = 0
            self._trim(ctypes.c_size_t(0))


def _free_in_cgroups(root: Path, mapped_bytes: int) -> Iterator[int]:
    """Yield the free memory of each cgroup (v2 and v1), from the root down to this process's.

    In a container the mount often starts at the container's own cgroup, while /proc/self/cgroup
    shows another path: missing folders are skipped.
    """
    version_2, version_1 = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    for folder in _down_to(version_2, _own_cgroup(root, "")):
        names = "memory.max", "memory.current", "inactive_file"
        yield from _free_in_cgroup(folder, mapped_bytes, *names)
    for folder in _down_to(version_1, _own_cgroup(root, "memory")):
        names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        yield from _free_in_cgroup(folder, mapped_bytes, *names)


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
    folder: Path, mapped_bytes: int, limit_file: str, used_file: str, cache_name: str
) -> Iterator[int]:
    """Yield the free memory of a cgroup, if it has a limit.

    Inactive page cache counts as free, but for mapped files, which may be in it.
    """
    limit, used = _text(folder / limit_file), _text(folder / used_file)
    if not (limit.isdecimal() and used.isdecimal()) or int(limit) >= NO_LIMIT_BYTES:
        return
    cache = re.search(rf"^{cache_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    cache_bytes = max(0, int(cache[1]) - mapped_bytes) if cache else 0
    yield max(int(limit) - int(used) + cache_bytes, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
