"""The native kernels, in each build that this processor can run."""

from __future__ import annotations

from functools import cache

from engine.runner.kernels.build import VARIANTS, KernelsUnavailable, cpu_features, library
from engine.runner.kernels.native import Kernels

NUM_THREADS = 2


@cache
def kernels_by_variant() -> dict[str, Kernels]:
    """Empty where there is no compiler: then torch is all there is to test."""
    try:
        return {
            variant.name: Kernels(library(variant), NUM_THREADS)
            for variant in VARIANTS
            if variant.features <= cpu_features()
        }
    except KernelsUnavailable:
        return {}
