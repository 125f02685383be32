"""Checks of installed software: torch, kernels, KV transports, GPU."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.core.units import format_bytes
from baton.doctor.findings import Finding, fail, ok, warn
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.kernels.build import (
    best_variant,
    build_folder,
    built,
    compiler_path,
    cpu_features,
)
from baton.kv_transfer.transports.base import UcxConfig
from baton.kv_transfer.transports.nixl import moves_device_memory
from baton.writable import folder_error

UNTIL_THEN = (
    "until then, torch is used, which gives other tokens than nodes with kernels now and then"
)
NVIDIA = Path("/proc/driver/nvidia/version")


def check_software() -> Iterator[Finding]:
    yield ok("Baton", f"{_version('baton')}, Python {platform.python_version()}, {sys.platform}")
    yield from _torch()
    variant = best_variant(cpu_features())
    yield kernels_finding(variant.name, built(variant), compiler_path(), build_folder())
    yield from package_findings(_version("nixl"), _version("ucxx-cu12"))
    if NVIDIA.exists() and _version("nixl") is not None:
        yield device_memory_finding(has_cuda=moves_device_memory(UcxConfig()))


def kernels_finding(
    variant: str, library: Path | None, compiler: str | None, cache: Path | None = None
) -> Finding:
    """Check the native kernels. `cache` is the folder they are built in."""
    if library is not None:
        return ok("kernels", f"{variant}, in {library.parent}")
    trouble = None if cache is None else folder_error(cache)
    if compiler is not None and trouble is not None:
        advice = f"set XDG_CACHE_HOME, or set BATON_KERNELS to built libraries; {UNTIL_THEN}"
        return warn("kernels", f"{variant}, not built: {trouble}", advice)
    if compiler is not None:
        return ok("kernels", f"{variant}, to be built by {compiler} when a model is first loaded")
    advice = f"install a C++ compiler, or set BATON_KERNELS to built libraries; {UNTIL_THEN}"
    return warn("kernels", f"{variant}, not built, and no compiler is here", advice)


def package_findings(nixl: str | None, ucxx: str | None) -> Iterator[Finding]:
    if nixl is None:
        advice = "pip install 'nixl>=1.5,<1.6', or give nodes --kv-transport ucxx"
        yield fail("NIXL", "not installed", advice)
    else:
        yield ok("NIXL", nixl)
    yield ok("UCXX", ucxx or "not installed; only --kv-transport ucxx needs it")


def device_memory_finding(*, has_cuda: bool) -> Finding:
    """Report how KV of GPUs is transferred."""
    if has_cuda:
        return ok("KV of GPUs", "NIXL reads and writes it directly")
    advice = (
        "UCX of NIXL lacks CUDA: check UCX_TLS and that libcuda.so.1 and libnvidia-ml.so.1 load"
    )
    return warn("KV of GPUs", "NIXL moves it through pinned host memory", advice)


def port_findings(host: str, ports: Sequence[int]) -> Iterator[Finding]:
    for port in ports:
        try:
            socket.create_server((host, port)).close()
        except OSError:
            advice = "a cluster may be running there: baton nodes; or choose another --port"
            yield warn(f"port {port}", f"in use on {host}", advice)
        else:
            yield ok(f"port {port}", f"free on {host}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield fail("torch", f"cannot be imported: {error}", "make, or pip install torch")
        return
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={threads}" if threads else ""
    capability = torch.backends.cpu.get_cpu_capability()
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield ok(
        "torch",
        f"{torch.__version__}, {build}, {torch.get_num_threads()} threads{limit}, {capability}",
    )
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = [f"{gpu.name}, {format_bytes(gpu.total_memory)}" for gpu in gpus]
    yield gpu_finding(names, has_driver=NVIDIA.exists(), torch_cuda=torch.version.cuda)


def gpu_finding(names: list[str], *, has_driver: bool, torch_cuda: str | None) -> Finding:
    if names:
        share = RunnerConfig("").gpu_memory_utilization
        return ok("GPU", f"{'; '.join(names)}; a node uses {share:.0%} (gpu-memory-utilization)")
    if not has_driver:
        return ok("GPU", "none; nodes compute on the CPU")
    if torch_cuda is None:
        advice = "install torch's CUDA build (README, GPUs) to use --device cuda"
        return warn("GPU", "present, but this torch build supports only the CPU", advice)
    return warn("GPU", "present, but torch cannot use it", "see nvidia-smi; is it visible?")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
