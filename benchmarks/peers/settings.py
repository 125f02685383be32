"""Start settings of other engines, tuned for their best performance."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from baton.core.errors import InvalidConfig


def python_of(venv: Path) -> Path:
    """Return the interpreter of a virtual environment. Raises InvalidConfig."""
    python = venv / "bin" / "python"
    if not python.exists():
        raise InvalidConfig(f"{venv} is not a virtual environment: it has no bin/python")
    return python.absolute()


def clean_environment() -> dict[str, str]:
    """Return this process's environment without OpenMP and Python settings, which slow peers."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "KMP_", "PYTHON"))
    }


# Share of a GPU's memory for a vLLM process, which leaves room for Baton or for a second one.
GPU_SHARE = 0.4
# A step that is interrupted by freezing may end much later.
PATIENT = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(24 * 3600)}


def vllm_settings(venv: Path, cpus: Sequence[int], kv_gib: int) -> dict[str, str]:
    """Return the fastest CPU settings of vLLM: one core per thread, and Intel OpenMP."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        **PATIENT,
    }
    openmp = venv.absolute() / "lib" / "libiomp5.so"
    return settings | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
