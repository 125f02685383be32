"""How other engines are started at their best, in environments of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.errors import InvalidConfig


def python_of(venv: Path) -> Path:
    """Raises InvalidConfig."""
    python = venv / "bin" / "python"
    if not python.exists():
        raise InvalidConfig(f"{venv} is no virtual environment: it has no bin/python")
    return python.absolute()


def clean_environment() -> dict[str, str]:
    """What was set for this process must not reach the peer: it is measured at its best."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "KMP_", "PYTHON"))
    }


def vllm_settings(venv: Path, cpus: Sequence[int], kv_gib: int) -> dict[str, str]:
    """What it is fastest with on a CPU: a core for each thread, and Intel's OpenMP."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        # A step that was under way when it was frozen may end much later.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(24 * 3600),
    }
    openmp = venv.absolute() / "lib" / "libiomp5.so"
    return settings | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
