"""Native kernels in each variant that this processor supports."""

from __future__ import annotations

from functools import cache

from baton.engine.runner.kernels.build import VARIANTS, KernelsUnavailable, cpu_features, library
from baton.engine.runner.kernels.calls import Kernels

NUM_THREADS = 2


@cache
def kernels_by_variant() -> dict[str, Kernels]:
    """Return the kernels of each variant; empty without a compiler."""
    try:
        return {
            variant.name: Kernels(library(variant), NUM_THREADS)
            for variant in VARIANTS
            if variant.features <= cpu_features()
        }
    except KernelsUnavailable:
        return {}
