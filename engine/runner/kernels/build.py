"""Builds the kernel library with the machine's C++ compiler, and caches it.

There is one variant per instruction set; the best one that this processor supports is used. A
machine without a compiler can use libraries built elsewhere: BATON_KERNELS names their folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
AVX512_BF16 = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
)
AVX512_BF16_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mavx512bf16", "-mavx512vnni", "-mfma"),
)
COMPILERS = ("c++", "g++", "clang++")


class KernelsUnavailable(Exception):
    """No kernel library is available; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Build of the kernels: required CPU features and compiler flags."""

    name: str
    features: frozenset[str]  # names of /proc/cpuinfo
    flags: tuple[str, ...]


VARIANTS = (
    Variant(
        "amx",
        AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Variant("avx512bf16", AVX512_BF16, AVX512_BF16_FLAGS),
    Variant("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    Variant("plain", frozenset(), ()),
)


def best_variant(features: frozenset[str]) -> Variant:
    """Return the first variant that the processor supports; `plain` requires no feature."""
    return next(variant for variant in VARIANTS if variant.features <= features)


def cpu_features() -> frozenset[str]:
    """Return the CPU features that this process can use; empty without /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    features = frozenset(flags.partition(":")[2].split())
    return features if _request_amx() else features - {"amx_tile"}


def _request_amx() -> bool:
    """Request permission for AMX tile registers: on Linux a process must do so once."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata = 158, 0x1023, 18
    error: int = ctypes.CDLL(None).syscall(arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata)
    return error == 0


def library(variant: Variant) -> Path:
    """Return the path of the variant's library, built if necessary. Raises KernelsUnavailable."""
    return built(variant) or _build(variant, build_folder() / file_name(variant))


def built(variant: Variant) -> Path | None:
    """Return the path of the variant's library, or None if it was not built yet."""
    paths = (folder / file_name(variant) for folder in _folders())
    return next((path for path in paths if path.exists()), None)


def build_folder() -> Path:
    """Return the folder for new libraries."""
    return _folders()[-1]


def file_name(variant: Variant) -> str:
    """Return the file name of the variant's library, with a digest of sources and flags."""
    return f"kernels-{variant.name}-{platform.machine()}-{_digest(variant)}.so"


def command_for(compiler: str, variant: Variant, target: Path, *more: str) -> list[str]:
    """Return the compiler command. Flags in `more` take precedence."""
    sources = map(str, sorted(SOURCES.glob("*.cpp")))
    return [compiler, *FLAGS, *variant.flags, *more, *sources, "-o", str(target)]


def compiler_path() -> str | None:
    """Return the path of the first C++ compiler found, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _folders() -> list[Path]:
    """Return the folders to search for libraries; new ones are written to the last."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    override = os.environ.get("BATON_KERNELS")
    return [*([Path(override)] if override else []), cache / "baton" / "kernels"]


def _digest(variant: Variant) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *variant.flags)).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(variant: Variant, target: Path) -> Path:
    """Build into a temporary file and move it to `target`, unless another process just has."""
    compiler = compiler_path()
    if compiler is None:
        raise KernelsUnavailable("there is no C++ compiler (c++, g++ or clang++): install one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent):
            if not target.exists():
                _compile(compiler, variant, target)
    except OSError as error:
        raise KernelsUnavailable(
            f"cannot write the kernels to {target.parent} ({error})"
        ) from error
    return target


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock `folder`: the nodes of a cluster start together, and one compiler run is enough."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = command_for(compiler, variant, output)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelsUnavailable(f"{compiler} cannot build the kernels: {done.stderr[:500]}")
        output.replace(target)
