"""Measures this machine's memory bandwidth and arithmetic peak with dedicated kernels."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np

from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import load_library
from baton.engine.runner.kernels.build import best_variant, cpu_features, library

_VECTOR_BYTES = 64
_READ_BYTES = 256 << 20  # larger than the caches
_NUM_PRODUCTS = 12_000_000  # per thread
_NUM_TRIES = 5
_FLOPS_PER_PRODUCT = 64  # sixteen lanes, two products and two sums in each


class LimitMeter:
    """Measures limits; owns the memory that it reads. Raises KernelsUnavailable."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._library = load_library(library(best_variant(cpu_features())))
        self._memory = np.frombuffer(huge_page_memory(_READ_BYTES), dtype=np.uint8)
        self._memory.fill(1)

    def bytes_per_s(self) -> float:
        """Return the bandwidth of sequential memory reads."""
        return _READ_BYTES / _fastest_s(
            lambda: self._library.baton_read_memory(
                self._memory.ctypes.data, _READ_BYTES // _VECTOR_BYTES, self._num_threads
            )
        )

    def flops_per_s(self) -> float:
        """Return the peak rate of bf16 products in registers, accumulated in float32."""
        flops = _NUM_PRODUCTS * _FLOPS_PER_PRODUCT * self._num_threads
        return flops / _fastest_s(
            lambda: self._library.baton_multiply_registers(_NUM_PRODUCTS, self._num_threads)
        )


def _fastest_s(do: Callable[[], object]) -> float:
    """Return the shortest of a few runs, the one with the least interference."""
    return min(timeit.repeat(do, number=1, repeat=_NUM_TRIES))
