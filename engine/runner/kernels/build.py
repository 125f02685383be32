"""Finds the kernel library, or builds it with the machine's C++ compiler and caches it.

There is one variant per instruction set; the best one that this processor supports is used. Wheels
contain libraries. A machine without a compiler can also use libraries built elsewhere:
BATON_KERNELS names their folder.

    python -m baton.engine.runner.kernels.build    # builds this processor's; loads no library
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from baton.core.user_cache import user_cache_folder

log = logging.getLogger(__name__)

PACKAGED = Path(__file__).resolve().parent / "built"  # libraries of a wheel, made by setup.py
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
WAITING = "waiting for another process that builds the kernels"
Report = Callable[[str], None]  # shows the latest progress, such as in a status line
MAX_AT_ONCE = 8  # each takes up to 0.3 GiB of memory


class KernelsUnavailable(Exception):
    """No kernel library is available; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Build of the kernels: required CPU features and compiler flags."""

    name: str
    features: frozenset[str]  # names of /proc/cpuinfo
    flags: tuple[str, ...]

    @property
    def has_tiles(self) -> bool:
        return "amx_tile" in self.features


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


def library(variant: Variant, report: Report = lambda _: None) -> Path:
    """Return the path of the variant's library, built if necessary. Raises KernelsUnavailable."""
    return built(variant) or _build(variant, build_folder() / file_name(variant), report)


def built(variant: Variant) -> Path | None:
    """Return the path of the variant's library, or None if it was not built yet."""
    paths = (folder / file_name(variant) for folder in _folders())
    return next((path for path in paths if path.exists() and _is_usable(path)), None)


def build_folder() -> Path:
    """Return the folder for new libraries."""
    return _folders()[-1]


def file_name(variant: Variant) -> str:
    """Return the file name of the variant's library, with a digest of sources and flags."""
    digest = _digest(SOURCES, (*FLAGS, *variant.flags))
    return f"kernels-{variant.name}-{platform.machine()}-{digest}.so"


def command_for(compiler: str, variant: Variant, target: Path, *more: str) -> list[str]:
    """Return the compiler command. Flags in `more` take precedence."""
    sources = map(str, sorted(SOURCES.glob("*.cpp")))
    return [compiler, *FLAGS, *variant.flags, *more, *sources, "-o", str(target)]


def compiler_path() -> str | None:
    """Return the path of the first C++ compiler found, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _folders() -> list[Path]:
    """Return the folders to search for libraries; new ones are written to the last."""
    override, cache = os.environ.get("BATON_KERNELS"), user_cache_folder()
    folders = [*([Path(override)] if override else []), PACKAGED]
    return folders if cache is None else [*folders, cache / "kernels"]


def _is_usable(path: Path) -> bool:
    """Return whether a library of a wheel loads here: it may need a newer C library."""
    if path.parent != PACKAGED:
        return True
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("The wheel's kernels cannot be used on this machine: %s", error)
        return False
    return True


@cache
def _digest(sources: Path, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted((*sources.glob("*.h"), *sources.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(variant: Variant, target: Path, report: Report) -> Path:
    """Build into a temporary file and move it to `target`, unless another process just has."""
    compiler = compiler_path()
    if compiler is None:
        raise KernelsUnavailable("there is no C++ compiler (c++, g++ or clang++): install one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent, report):
            if not target.exists():
                _compile(compiler, variant, target, report)
    except OSError as error:
        raise KernelsUnavailable(
            f"cannot write the kernels to {target.parent} ({error})"
        ) from error
    return target


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Lock `folder`: the nodes of a cluster start together, and one build is enough."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s", WAITING.capitalize())
            report(WAITING)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, variant: Variant, target: Path, report: Report) -> None:
    """Compile one object per source, then link them."""
    began_s = time.monotonic()
    # Large ones first: they take longest, and small ones fill the gaps at the end.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)
    log.info("Building the kernels for this CPU (%s), once: %d files", variant.name, len(sources))
    counter = itertools.count()

    def report_done() -> None:
        done = f"{next(counter)} of {len(sources)} files"
        report(f"building kernels for this CPU, once: {done}")

    report_done()  # none yet
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        flags = [compiler, *FLAGS, *variant.flags]
        output = Path(folder) / target.name
        try:
            run_commands(
                [
                    [*flags, "-c", str(source), "-o", path]
                    for source, path in zip(sources, objects, strict=True)
                ],
                on_done=report_done,
            )
            run_commands([[*flags, *objects, "-o", str(output)]], on_done=lambda: None)
        except CompilerFailed as error:
            raise KernelsUnavailable(
                f"{compiler} cannot build the kernels: {str(error)[:500]}"
            ) from error
        output.replace(target)
    log.info("Built the kernels in %.0f s: %s", time.monotonic() - began_s, target)


class CompilerFailed(Exception):
    """A compiler command failed; the message is its output."""


def run_commands(commands: Sequence[Sequence[str]], on_done: Callable[[], None]) -> None:
    """Run the commands; `on_done` is called after each. Raises CompilerFailed.

    When one fails, or Ctrl-C is pressed, the others are terminated before this returns.
    """
    compilers = _Compilers()
    num_at_once = min(MAX_AT_ONCE, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_at_once) as threads:
        jobs = [threads.submit(compilers.run, command) for command in commands]
        try:
            for job in as_completed(jobs):
                job.result()
                on_done()
        except BaseException:
            compilers.terminate()
            raise


class _Compilers:
    """Running compilers. None starts after `terminate`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_terminated = False

    def run(self, command: Sequence[str]) -> None:
        with self._lock:
            if self._is_terminated:
                return
            process = _start(command)
            self._running.add(process)
        _, errors = process.communicate()
        self._running.discard(process)
        if process.returncode:
            raise CompilerFailed(errors)

    def terminate(self) -> None:
        with self._lock:
            self._is_terminated = True
            for process in tuple(self._running):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a compiler in its own process group: it is several processes, which end together."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def main() -> None:
    """Build this processor's variant, as installations do. Without a compiler, print why not."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the compilers
    try:
        print(library(best_variant(cpu_features()), print))
    except KernelsUnavailable as error:
        print(f"The native kernels were not built, torch will compute: {error}")


if __name__ == "__main__":
    main()
