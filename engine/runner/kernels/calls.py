"""Calls of the kernel library with tensors, and copies of KV blocks with digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import (
    FUNCTIONS,
    CopyArgs,
    GateParams,
    NormParams,
    Struct,
    load_library,
)
from baton.engine.runner.kernels.build import best_variant, built, cpu_features
from baton.engine.runner.model.config import Activation
from baton.engine.runner.model.ops import MlpGate, Norm
from baton.engine.runner.model.pass_layout import Ints
from baton.kv_transfer.tiers.kv_access import DIGEST_BYTES, BlockMemory, CopyBlocks, copy_blocks

_GATE_KINDS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.CLAMPED_SWIGLU: 2,
    Activation.SQUARED_RELU: 3,
}
MIN_BLOCK_BYTES = 241  # the kernel has no digests of fewer bytes


class Kernels:
    """Loaded kernel library. Results are bit-identical for any number of threads.

    Tensors are passed as addresses. The caller checks their shapes and keeps them alive during the
    call.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self.path = path
        self.library = load_library(path)
        self.num_threads = num_threads
        self._functions = {
            name: (getattr(self.library, name), arguments[0]._type_)
            for name, (_, arguments) in FUNCTIONS.items()
            if len(arguments) == 1
        }

    def call(self, name: str, **fields: object) -> None:
        """Call a function with a struct of these fields and the number of threads."""
        function, struct = self._functions[name]
        for field, value in fields.items():
            if type(value) is Tensor:  # isinstance takes 0.2 µs for each number
                fields[field] = value.data_ptr()
        fields["num_threads"] = self.num_threads
        function(struct(**fields))


class Workspace:
    """Buffer of intermediate results on huge pages, kept from one call to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def split(self, *sizes: int) -> list[int]:
        """Return the addresses of buffers with these sizes in bytes."""
        *starts, total = accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
        if len(self._memory) < total:
            self._memory = torch.frombuffer(huge_page_memory(total), dtype=torch.uint8)
        return [self._memory.data_ptr() + start for start in starts]


class PassArrays:
    """Arrays that a struct of a pass points to, kept alive as long as this is."""

    def __init__(self) -> None:
        self._arrays: list[Ints] = []

    def address(self, array: Ints) -> int:
        self._arrays.append(np.ascontiguousarray(array))
        return int(self._arrays[-1].ctypes.data)


def norm_params(norm: Norm | None) -> Struct:
    if norm is None:
        return NormParams()
    ranks = None if norm.group is None else norm.group.address
    return NormParams(norm.weight.data_ptr(), norm.epsilon, norm.rounds_once, ranks)


def gate_params(gate: MlpGate) -> Struct:
    return GateParams(_GATE_KINDS[gate.activation], gate.alpha, gate.limit)


def fastest_copies(block_bytes: int) -> CopyBlocks:
    """Return the kernel if its library is built already; otherwise what needs none."""
    path = built(best_variant(cpu_features()))
    if path is None or block_bytes < MIN_BLOCK_BYTES:
        return copy_blocks
    return NativeCopies(load_library(path).baton_copy_blocks)


class NativeCopies:
    """Implements CopyBlocks. One call of the kernel copies all blocks."""

    def __init__(self, kernel: Callable[[Struct], None]) -> None:
        self._kernel = kernel

    def __call__(
        self,
        source: BlockMemory,
        blocks: Sequence[int],
        target: BlockMemory,
        into: Sequence[int],
    ) -> list[bytes]:
        sources, targets = source.addresses_of(blocks), target.addresses_of(into)
        digests = np.empty((len(sources), DIGEST_BYTES), np.uint8)
        self._kernel(
            CopyArgs(
                src_addresses=sources.ctypes.data,
                dst_addresses=targets.ctypes.data,
                digests=digests.ctypes.data,
                num_blocks=len(sources),
                block_bytes=source.block_bytes,
            )
        )
        return [digest.tobytes() for digest in digests]
