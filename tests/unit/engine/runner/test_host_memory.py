"""Memory on huge pages, as the kernel reports it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from baton.engine.runner.device.host_memory import huge_page_memory

SIZE = 4 << 20
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_huge_pages_are_requested_for_private_memory() -> None:
    memory = huge_page_memory(SIZE)

    flags = _kernel_flags(ctypes.addressof(ctypes.c_char.from_buffer(memory)))

    assert "hg" in flags  # madvise(MADV_HUGEPAGE) was taken
    assert "sh" not in flags  # pages of shared memory are never huge by this


def test_host_memory_is_zeroed_and_writable() -> None:
    memory = np.frombuffer(huge_page_memory(SIZE), dtype=np.uint8)

    assert not memory.any()
    memory[:] = 7
    assert memory.min() == 7


def _kernel_flags(address: int) -> list[str]:
    """Return the VmFlags of the mapping that contains this address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, _, end = name.partition("-")
            is_inside = int(begin, 16) <= address < int(end, 16)
        elif is_inside and name == "VmFlags:":
            return rest.split()
    raise LookupError(f"nothing is mapped at {address:#x}")
