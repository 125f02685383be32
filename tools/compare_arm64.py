"""Compare the kernels built for arm64 with the baseline build for this machine's architecture.

Both builds run every kernel on the same random numbers and must print the same bits. On x86-64 the
baseline has no instruction that multiplies and adds with one rounding; the comparison builds it
with one, as arm64 has.

    python -m tools.compare_arm64               # or: make arm64; needs a cross compiler and qemu
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.engine.runner.kernels.build import SOURCES, VARIANTS, command_for, compiler_path

HERE = Path(__file__).resolve().parent
PROGRAM = ("-fno-PIC", "-no-pie", "-static", f"-I{SOURCES}", str(HERE / "print_kernel_outputs.cpp"))
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PACKAGES = "g++ g++-aarch64-linux-gnu qemu-user-static"
FUSED = ("-mfma",) if platform.machine() == "x86_64" else ()


@dataclass(slots=True)
class KernelTally:
    """Comparison of one kernel's outputs."""

    num_numbers: int = 0
    num_different: int = 0
    max_steps: int = 0  # largest difference, in steps of 16-bit numbers


def main() -> int:
    missing = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
    compiler = compiler_path()
    if missing or compiler is None:
        needed = ", ".join(missing) or "a C++ compiler"
        print(f"Missing: {needed}; on Debian: apt-get install {PACKAGES}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="baton-arm64-") as folder:
        own = _run(compiler, Path(folder, "own"), FUSED)
        other = _run(CROSS_COMPILER, Path(folder, "arm64"), (), EMULATOR)
    tallies = compare(own, other)
    for kernel, tally in tallies.items():
        print(
            f"{kernel:13} {tally.num_numbers:7} numbers, {tally.num_different} different, "
            f"by at most {tally.max_steps} steps"
        )
    return 0 if are_equal(tallies) else 1


def compare(own: str, other: str) -> dict[str, KernelTally]:
    """Compare the lines of both programs, by kernel."""
    tallies: dict[str, KernelTally] = {}
    for own_line, other_line in zip(own.splitlines(), other.splitlines(), strict=True):
        tally = tallies.setdefault(own_line.split(maxsplit=1)[0], KernelTally())
        for steps in _steps_between(own_line, other_line):
            tally.num_numbers += 1
            tally.num_different += steps > 0
            tally.max_steps = max(tally.max_steps, steps)
    return tallies


def are_equal(tallies: dict[str, KernelTally]) -> bool:
    return bool(tallies) and not any(tally.num_different for tally in tallies.values())


def _steps_between(own_line: str, other_line: str) -> Iterator[int]:
    """Yield the distance of the numbers at each position, in steps of 16-bit numbers."""
    own_kernel, *own_bits = own_line.split()
    other_kernel, *other_bits = other_line.split()
    if own_kernel != other_kernel:
        raise ValueError(f"{own_kernel} against {other_kernel}: the programs differ")
    for own, other in zip(own_bits, other_bits, strict=True):
        yield abs(int(own, 16) - int(other, 16))


def _run(compiler: str, program: Path, flags: Sequence[str], *emulator: str) -> str:
    plain = next(variant for variant in VARIANTS if not variant.features)
    command = command_for(compiler, plain, program, *flags, *PROGRAM)
    build = [part for part in command if part != "-shared"]
    print(f"building with {compiler}", flush=True)
    subprocess.run(build, check=True)
    run = [*emulator, str(program)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
