"""Ahead-of-time compilation of recorded launches of Triton kernels, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from baton.engine.runner.kernels.choose import Parts, triton_parts

NVIDIA_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
AMD_WAVE = 64  # threads
PRODUCTS = re.compile(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")


class Launch(NamedTuple):
    """A kernel, its arguments and its options, as the runner launches it."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a compiled kernel."""

    name: str
    target: str  # sm_90, gfx942
    num_warps: int
    registers: int  # per thread; of AMD's, vector registers
    shared_bytes: int  # per program
    stack_bytes: int  # per thread; spilled registers are there
    products: tuple[str, ...]  # instructions of NVIDIA's tensor cores


def compile_kernel(name: str, launch: Launch, target: str) -> KernelResources:
    import triton
    from triton.compiler import make_backend

    gpu = gpu_target(target)
    options = dict(launch.options)
    if gpu.backend == "hip":
        options.pop("maxnreg", None)  # of NVIDIA's compiler alone
    source = make_source(launch, make_backend(gpu))
    compiled = triton.compile(source, target=gpu, options=options)
    read = read_amd_resources if gpu.backend == "hip" else read_nvidia_resources
    registers, stack_bytes = read(compiled.asm)
    products = tuple(sorted(set(PRODUCTS.findall(compiled.asm.get("ptx", "")))))
    metadata = compiled.metadata
    return KernelResources(
        name, target, metadata.num_warps, registers, metadata.shared, stack_bytes, products
    )


def gpu_target(target: str) -> Any:
    """Return Triton's target of a name: sm_90 or gfx942."""
    from triton.backends.compiler import GPUTarget

    if target.startswith("gfx"):
        return GPUTarget("hip", target, AMD_WAVE)
    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def make_source(launch: Launch, backend: Any) -> Any:
    """Return the source with types and hints as a launch on a GPU specialises them."""
    from triton._utils import find_paths_if, get_iterable_path
    from triton.compiler import ASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    types = [kind for kind, _ in specialization]
    hints = ["" if kind == "constexpr" else hint for kind, hint in specialization]
    values = list(bound.values())
    is_constant = find_paths_if(types, lambda _, kind: kind == "constexpr")
    has_hint = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
    return ASTSource(
        kernel,
        dict(zip(kernel.arg_names, types, strict=True)),
        {path: get_iterable_path(values, path) for path in is_constant},
        {path: backend.parse_attr(get_iterable_path(hints, path)) for path in has_hint},
    )


def read_nvidia_resources(compiled: Any) -> tuple[int, int]:
    """Return registers and bytes of stack per thread."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled["cubin"])
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = NVIDIA_RESOURCES.search(output)
    if found is None:
        raise ValueError(f"cuobjdump printed no registers: {output}")
    return int(found[1]), int(found[2])


def read_amd_resources(compiled: Any) -> tuple[int, int]:
    """Return vector registers and bytes of private memory per thread."""
    assembly = compiled["amdgcn"]
    return _read_field(assembly, "vgpr_count"), _read_field(assembly, "private_segment_fixed_size")


def _read_field(assembly: str, name: str) -> int:
    """Return a number of the metadata of a kernel."""
    found = re.search(rf"^ +\.{name}: +(\d+)$", assembly, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly has no field {name}")
    return int(found[1])


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in set(named) - set(kernel.arg_names)}
        del options["grid"], options["warmup"]
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
        launches.append(Launch(kernel, arguments, options))

    run, JITFunction.run = JITFunction.run, record
    try:
        yield launches
    finally:
        JITFunction.run = run


@cache
def parts() -> Parts:
    return triton_parts(torch.bfloat16, torch.device("cpu"))


@cache
def batch_invariant_parts() -> Parts:
    return triton_parts(torch.bfloat16, torch.device("cpu"), batch_invariant=True)
