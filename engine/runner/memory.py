"""Memory of a process on huge pages where the machine has them. Knows nothing of torch.

A copy between two processes (CMA) asks the kernel for every page of it, and what is read block
by block needs a place in the TLB for each: with pages of 4 KiB that costs more than the copy.
"""

from __future__ import annotations

import mmap


def huge_page_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed, and taken from the machine as it is touched. Private: huge pages of shared memory
    are a setting of their own, off nearly everywhere."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
