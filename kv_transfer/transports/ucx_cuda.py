"""Check whether a UCX can read and write memory of GPUs. NIXL fails only when it is accessed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from baton.kv_transfer.transports.base import UcxConfig

# Libraries of the driver that the module loads. Containers without the driver capability "utility"
# lack the second one, although torch computes on the GPU.
DRIVER_LIBRARIES = "libcuda.so.1", "libnvidia-ml.so.1"
MODULES = "libuct_cuda.so*"
SYSTEM_FOLDERS = Path("/usr/lib/ucx"), Path("/usr/lib64/ucx"), Path("/usr/local/lib/ucx")


def ucx_has_cuda(
    package: Path, config: UcxConfig, driver: Sequence[str] = DRIVER_LIBRARIES
) -> bool:
    """Return whether UCX has CUDA: its module, the driver, and UCX_TLS allow it.

    The module is next to the package of a wheel, or where the system has it.
    """
    folders = (package.with_name(f"{package.name}.libs") / "ucx", *SYSTEM_FOLDERS)
    has_module = any(any(folder.glob(MODULES)) for folder in folders)
    is_allowed = allows_cuda(os.environ.get("UCX_TLS", config.tls))
    return has_module and is_allowed and all(map(_loads, driver))


def allows_cuda(tls: str) -> bool:
    """Return whether a UCX_TLS value allows copies from and to GPUs."""
    listed = set(tls.lstrip("^").split(",")) - {""}
    is_named = bool(listed & {"cuda", "cuda_copy"})
    if tls.startswith("^"):
        return not is_named
    return not listed or is_named or "all" in listed


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
