"""Memory that processes of a machine share. It has no name, and is freed with the last of them."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from baton.core.errors import InvalidConfig


def make_shared_memory(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return zeroed memory, and its file descriptor for other processes. Raises InvalidConfig."""
    if not hasattr(os, "memfd_create"):
        raise InvalidConfig("--tensor-parallel-size needs Linux: its processes share memory")
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        return map_shared_memory(fd, num_bytes), fd
    except BaseException:
        os.close(fd)
        raise


def map_shared_memory(fd: int, num_bytes: int) -> mmap.mmap:
    """Map memory of another process, on huge pages where the machine supports them."""
    memory = mmap.mmap(fd, num_bytes)
    with suppress(OSError):  # most machines allow them for private memory alone
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
