"""The kernels' library: built once by the machine's own compiler, then found again.

There is a build for each kind of processor; the best that this one can run is taken. A machine
without a compiler can be given the libraries of another in BATON_KERNELS.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
AVX512_BF16 = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
)
AVX512_BF16_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mavx512bf16", "-mavx512vnni", "-mfma"),
)
COMPILERS = ("c++", "g++", "clang++")


class KernelsMissing(Exception):
    """There is no library of kernels here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One build: what it asks of the processor, and how the compiler is told."""

    name: str
    features: frozenset[str]  # as /proc/cpuinfo calls them
    flags: tuple[str, ...]


VARIANTS = (
    Variant(
        "amx",
        AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Variant("avx512bf16", AVX512_BF16, AVX512_BF16_FLAGS),
    Variant("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
    Variant("plain", frozenset(), ()),
)


def best_variant(features: frozenset[str]) -> Variant:
    """The first that the processor can run; plain asks nothing."""
    return next(variant for variant in VARIANTS if variant.features <= features)


def cpu_features() -> frozenset[str]:
    """Those that this process may use; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    features = frozenset(flags.partition(":")[2].split())
    return features if _may_have_tiles() else features - {"amx_tile"}


def _may_have_tiles() -> bool:
    """Linux gives a process the registers of tiles only if it asks, once, for all its threads."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    arch_prctl, ask_for, tile_data = 158, 0x1023, 18
    refusal: int = ctypes.CDLL(None).syscall(arch_prctl, ask_for, tile_data)
    return refusal == 0


def library(variant: Variant) -> Path:
    """Where the variant's library is, built if need be. Raises KernelsMissing."""
    return built(variant) or _build(variant, build_folder() / file_name(variant))


def built(variant: Variant) -> Path | None:
    """Where it is, if it was built before."""
    places = (folder / file_name(variant) for folder in _folders())
    return next((place for place in places if place.exists()), None)


def build_folder() -> Path:
    """Where a new library goes."""
    return _folders()[-1]


def file_name(variant: Variant) -> str:
    """Of its library: another one as soon as the sources or flags are others."""
    return f"kernels-{variant.name}-{platform.machine()}-{_digest(variant)}.so"


def command_for(compiler: str, variant: Variant, target: Path, *more: str) -> list[str]:
    """What builds it; further flags have the last word."""
    sources = map(str, sorted(SOURCES.glob("*.cpp")))
    return [compiler, *FLAGS, *variant.flags, *more, *sources, "-o", str(target)]


def compiler_path() -> str | None:
    """What would build it."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _folders() -> list[Path]:
    """Where libraries may lie; a new one goes into the last."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    given = os.environ.get("BATON_KERNELS")
    return [*([Path(given)] if given else []), cache / "baton" / "kernels"]


def _digest(variant: Variant) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *variant.flags)).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(variant: Variant, target: Path) -> Path:
    """Into a file beside it, which is then moved there: others may be building it too."""
    compiler = compiler_path()
    if compiler is None:
        raise KernelsMissing("there is no C++ compiler (c++, g++ or clang++): install one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = command_for(compiler, variant, made)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelsMissing(f"{compiler} cannot build them: {done.stderr[:500]}")
            made.replace(target)
    except OSError as error:
        raise KernelsMissing(f"{target.parent} cannot take them ({error})") from error
    return target
