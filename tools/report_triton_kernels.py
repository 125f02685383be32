"""Compile the Triton kernels for NVIDIA GPUs, and report registers, shared memory and spills.

Needs the package triton, but no GPU: `python -m tools.report_triton_kernels` records the launches
of the runner's parts for typical sizes and compiles each kernel ahead of time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from baton.engine.runner.attention.kv_tensor import scale_bytes
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.kernels.choose import triton_parts
from baton.engine.runner.layout import PassLayout
from baton.engine.runner.model.config import Activation
from baton.engine.runner.model.ops import MlpGate, Norm
from baton.engine.runner.triton.availability import INTERPRETER_VARIABLE

CAPABILITIES = (80, 90, 100)
HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = 576, 512  # of keys and of values, as in DeepSeek V3
DTYPES = (torch.bfloat16, torch.float32)
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 8, 2, 16
LATENT_HEADS = 128  # with one KV head
HIDDEN_SIZE, VOCAB_SIZE = 4096, 128_256
TYPE_NAMES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


class Launch(NamedTuple):
    """A kernel, its arguments and its options, as the runner launches it."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a compiled kernel."""

    name: str
    capability: int  # 90: sm_90
    registers: int  # per thread
    shared_bytes: int  # per program
    stack_bytes: int  # per thread; spilled registers are there


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, action="append", help="90: sm_90; repeatable")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if os.environ.pop(INTERPRETER_VARIABLE, None):
        parser.error(f"{INTERPRETER_VARIABLE} must not be set")
    launches = {name: launch for name, launch in all_launches().items() if options.only in name}
    found = [
        compile_kernel(name, launch, capability)
        for name, launch in launches.items()
        for capability in options.capability or CAPABILITIES
    ]
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        print_table(found)


def print_table(found: Sequence[KernelResources]) -> None:
    print(f"{'kernel':42} {'sm':>4} {'registers':>9} {'shared':>7} {'stack':>5}")
    for each in found:
        print(
            f"{each.name:42} {each.capability:4} {each.registers:9} {each.shared_bytes:7} "
            f"{each.stack_bytes:5}"
        )


def all_launches() -> dict[str, Launch]:
    """Return a launch of each kernel in each variant, by name."""
    launches: dict[str, Launch] = {}
    for dtype in DTYPES:
        suffix = str(dtype).removeprefix("torch.")
        launches |= {f"{name} {suffix}": each for name, each in ops_launches(dtype)}
        for head_dim in HEAD_DIMS:
            for kv_dtype in (dtype, torch.int8):
                name = f"attention {head_dim} {suffix}" + (" int8-kv" * (kv_dtype != dtype))
                launches |= attention_launches(name, dtype, kv_dtype, head_dim)
    options = {"window": 512, "softcap": 30.0, "sinks": torch.zeros(8)}
    name = "attention 128 bfloat16 softcap sinks"
    launches |= attention_launches(name, torch.bfloat16, torch.bfloat16, 128, **options)
    head_dim, value_dim = LATENT_DIMS
    name = f"attention {head_dim}/{value_dim} bfloat16"
    return launches | attention_launches(
        name, torch.bfloat16, torch.bfloat16, head_dim, value_dim=value_dim
    )


def ops_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of the elementwise operations."""
    ops = triton_parts().ops
    rows, gates = torch.zeros(2, HIDDEN_SIZE, dtype=dtype), torch.zeros(2, 1, dtype=dtype)
    heads = torch.zeros(2, 8, 128, dtype=dtype)
    angles = (heads[:, :1].contiguous(), heads[:, :1].contiguous())
    norm, head_norm = Norm(rows[0], 1e-6), Norm(heads[0, 0], 1e-6)
    with recorded_launches() as launches:
        ops.rms_norm(rows, norm)
        ops.apply_rope(heads, head_norm, angles)
        for activation in Activation:
            ops.apply_gate(rows, MlpGate(activation, 1.702, 7.0))
        ops.multiply_sigmoid(rows, gates)
        ops.multiply_sigmoid(rows, rows)
        ops.add(rows, rows, 0.5)
        if dtype is torch.float32:
            ops.find_peaks(torch.zeros(2, VOCAB_SIZE))
    for launch in launches:
        variant = launch.arguments.get("activation", launch.arguments.get("is_scalar", ""))
        name = launch.kernel.__name__.removesuffix("_kernel")
        yield f"{name} {variant}".strip(), launch


def attention_launches(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, **options: Any
) -> dict[str, Launch]:
    """Return the launches of a pass with a prompt of 32 tokens."""
    is_latent = "value_dim" in options
    num_tensors, num_kv_heads = (1, 1) if is_latent else (2, NUM_KV_HEADS)
    slots = num_kv_heads, BLOCK_SIZE, head_dim + scale_bytes(kv_dtype)
    kv = torch.zeros(2, 1, num_tensors, *slots, dtype=kv_dtype)
    layer = LayerAttention(head_dim**-0.5, **options)
    keys = torch.zeros(32, num_kv_heads, head_dim, dtype=dtype)
    num_heads = LATENT_HEADS if is_latent else NUM_HEADS
    query = torch.zeros(32, num_heads, head_dim, dtype=dtype)
    with recorded_launches() as launches:
        attention_pass = triton_parts().make_attention(kv, [layer]).begin(prompt_layout())
        attention_pass.write(0, keys, None)
        attention_pass.attend(0, query)
    write, attend = launches
    return {name.replace("attention", "write"): write, name: attend}


def prompt_layout() -> PassLayout:
    positions = np.arange(32)
    return PassLayout(
        num_queries=np.array([32]),
        context_lens=np.array([32]),
        block_tables=np.array([[[0, 1]]]),
        positions=positions,
        write_blocks=(positions // BLOCK_SIZE)[None],
        write_offsets=positions % BLOCK_SIZE,
    )


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


def compile_kernel(name: str, launch: Launch, capability: int) -> KernelResources:
    import triton
    from triton.backends.compiler import GPUTarget

    source = make_source(launch)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    registers, stack_bytes = read_resources(compiled.asm["cubin"])
    return KernelResources(name, capability, registers, compiled.metadata.shared, stack_bytes)


def make_source(launch: Launch) -> Any:
    """Return the source with types and hints as a launch on a GPU would specialise them."""
    from triton.compiler import ASTSource

    kernel, arguments = launch.kernel, launch.arguments
    constants = {
        parameter.name: arguments[parameter.name]
        for parameter in kernel.params
        if parameter.is_constexpr or is_one(parameter, arguments[parameter.name])
    }
    types = {
        name: "constexpr" if name in constants else type_name(arguments[name])
        for name in kernel.arg_names
    }
    hints = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if parameter.name not in constants and is_aligned(parameter, arguments[parameter.name])
    }
    return ASTSource(kernel, types, constants, hints)


def type_name(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPE_NAMES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def is_one(parameter: Any, argument: object) -> bool:
    is_special = not parameter.do_not_specialize and isinstance(argument, int)
    return is_special and argument == 1


def is_aligned(parameter: Any, argument: object) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % 16 == 0
    return isinstance(argument, int) and argument % 16 == 0


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = RESOURCES.search(output)
    if found is None:
        raise ValueError(f"cuobjdump printed no registers: {output}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
