"""Process memory on huge pages where the machine supports them. Imports no torch.

A copy between two processes (CMA) costs kernel work for every page, and reading block by block
costs a TLB entry for each page. With 4 KiB pages this costs more than the copy itself.
"""

from __future__ import annotations

import mmap


def huge_page_memory(num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` of zeroed memory, allocated by the kernel on first access.

    The mapping is private: huge pages of shared memory have their own setting, which is off by
    default on nearly all systems.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
