"""Returns freed heap memory to the system while weights are loaded. No torch."""

from __future__ import annotations

import ctypes

TRIM_INTERVAL = 256 << 20  # loaded bytes


class HeapTrimmer:
    """Trims the heap of glibc.

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
