"""Compare the kernels built for arm64 with the baseline build for this machine's architecture.

Both builds run every kernel on the same random numbers. Results may differ by one rounding step,
since one architecture fuses multiply and add where the other does not.

    python -m tools.compare_arm64               # or: make arm64; needs a cross compiler and qemu
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.runner.kernels.build import SOURCES, VARIANTS, command_for, compiler_path

HERE = Path(__file__).resolve().parent
PROGRAM = ("-fno-PIC", "-no-pie", "-static", f"-I{SOURCES}", str(HERE / "print_kernel_outputs.cpp"))
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PACKAGES = "g++ g++-aarch64-linux-gnu qemu-user-static"
MAX_ROUNDED_SHARE = 1e-3  # share of numbers that may differ, each by one step
NOT_NUMBERS = frozenset({"argmax", "route"})  # indices, which must be equal

# By kernel: counts of all numbers, of those that differ by one step, and by more.
Tally = dict[str, list[int]]


def main() -> int:
    missing = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
    compiler = compiler_path()
    if missing or compiler is None:
        needed = ", ".join(missing) or "a C++ compiler"
        print(f"Missing: {needed}; on Debian: apt-get install {PACKAGES}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="baton-arm64-") as folder:
        own = _run(compiler, Path(folder, "own"))
        other = _run(CROSS_COMPILER, Path(folder, "arm64"), EMULATOR)
    tally = compared(own, other)
    for kernel, (num_numbers, num_rounded, num_wrong) in tally.items():
        print(
            f"{kernel:13} {num_numbers:7} numbers, {num_rounded} rounded differently, "
            f"{num_wrong} wrong"
        )
    return 0 if are_alike(tally) else 1


def compared(own: str, other: str) -> Tally:
    tally: Tally = {}
    for own_line, other_line in zip(own.splitlines(), other.splitlines(), strict=True):
        kernel = own_line.split(maxsplit=1)[0]
        counts = tally.setdefault(kernel, [0, 0, 0])
        for steps in _steps_between(own_line, other_line):
            counts[0] += 1
            counts[1] += steps == 1 and kernel not in NOT_NUMBERS
            counts[2] += steps > 1 or (steps == 1 and kernel in NOT_NUMBERS)
    return tally


def are_alike(tally: Tally) -> bool:
    return bool(tally) and all(
        num_wrong == 0 and num_rounded <= MAX_ROUNDED_SHARE * num_numbers
        for num_numbers, num_rounded, num_wrong in tally.values()
    )


def _steps_between(own_line: str, other_line: str) -> Iterator[int]:
    """Yield the distance of the numbers at each position, in steps of 16-bit numbers."""
    own_kernel, *own_bits = own_line.split()
    other_kernel, *other_bits = other_line.split()
    if own_kernel != other_kernel:
        raise ValueError(f"{own_kernel} against {other_kernel}: the programs differ")
    for own, other in zip(own_bits, other_bits, strict=True):
        yield abs(int(own, 16) - int(other, 16))


def _run(compiler: str, program: Path, *emulator: str) -> str:
    plain = next(variant for variant in VARIANTS if not variant.features)
    build = [part for part in command_for(compiler, plain, program, *PROGRAM) if part != "-shared"]
    print(f"building with {compiler}", flush=True)
    subprocess.run(build, check=True)
    run = [*emulator, str(program)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
