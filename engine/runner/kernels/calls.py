"""Calls of the kernel library with tensors."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import FUNCTIONS, GateParams, NormParams, Struct, load_library
from baton.engine.runner.model.config import Activation
from baton.engine.runner.model.ops import MlpGate, Norm
from baton.engine.runner.model.pass_layout import Ints

_GATE_KINDS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.CLAMPED_SWIGLU: 2,
    Activation.SQUARED_RELU: 3,
}


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
