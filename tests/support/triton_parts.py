"""Triton parts of the runner for tensors on the CPU, under Triton's interpreter.

Without the interpreter, `kernels_on_copies` launches the same kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.runner.attention.paged_attention import LayerAttention, PagedAttention
from baton.engine.runner.kernels.choose import Parts, triton_parts
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.sampling.torch_sampling import SamplingBackend
from baton.engine.runner.state.linear_attention import LinearAttention
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.triton.availability import uses_interpreter
from tests.support.device_tensors import change_all, device_tensors, reveal
from tests.support.fake_device import FakeDevice

Run = Callable[..., None]  # method of a kernel that launches it
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.triton), pytest.param("cuda", marks=ON_A_GPU)]
)


def require_triton() -> None:
    """Skip the test without Triton. Interpreters before 3.9's do not run the kernels."""
    oldest = "3.9" if uses_interpreter() else "3.6"
    reason = f"the package triton is not installed, or older than {oldest}"
    pytest.importorskip("triton", minversion=oldest, reason=reason)


@cache
def interpreted_parts() -> Parts:
    require_triton()
    return triton_parts(torch.float32, torch.device("cpu"))


@cache
def batch_invariant_parts() -> Parts:
    require_triton()
    return triton_parts(torch.float32, torch.device("cpu"), batch_invariant=True)


def batch_invariant_ops() -> Ops:
    """Return operations that multiply plain matrices in Triton, too."""
    return batch_invariant_parts().ops


def triton_ops() -> Ops:
    return interpreted_parts().ops


def triton_attention(kv: Tensor, layers: Sequence[LayerAttention]) -> PagedAttention:
    return interpreted_parts().make_attention(kv, layers)


def triton_linear_attention(kv: Tensor, shape: StateShape) -> LinearAttention:
    return interpreted_parts().make_linear_attention(kv, shape)


def triton_sampling() -> SamplingBackend:
    return interpreted_parts().sampling


@contextmanager
def launched_kernels() -> Iterator[list[str]]:
    """Collect the names of kernels as they are launched."""
    names: list[str] = []

    def note(run: Run, kernel: Any, *args: Any, **named: Any) -> None:
        names.append(kernel.fn.__name__)
        run(kernel, *args, **named)

    with _launched_by(note):
        yield names


@contextmanager
def kernels_on_copies(device: torch.device) -> Iterator[None]:
    """Launch kernels on copies of CPU tensors on this device, and copy back what they change.

    Tensors that contain addresses of CPU tensors, as those of experts, cannot be copied.
    """

    def launch(run: Run, kernel: Any, *args: Any, **named: Any) -> None:
        copies = _Copies(device)
        moved_args, moved_named = change_all((args, named), copies.move)
        run(kernel, *moved_args, **moved_named)
        copies.store()

    with _launched_by(launch):
        yield


class _Copies:
    """Copies of the memory of tensors, one of what several tensors share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by address: bytes, and their copy

    def move(self, value: Any) -> Any:
        """Return a tensor of the copied memory for a CPU tensor, and other values as they are."""
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._copies:
            own = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._copies[storage.data_ptr()] = own, own.to(self._device, copy=True)
        memory = self._copies[storage.data_ptr()][1].untyped_storage()
        moved = torch.empty(0, dtype=value.dtype, device=self._device)
        return moved.set_(memory, value.storage_offset(), value.shape, value.stride())

    def store(self) -> None:
        for own, copy in self._copies.values():
            stored = copy.cpu()
            if not torch.equal(own, stored):  # others can be read-only
                own.copy_(stored)


@contextmanager
def _launched_by(launch: Callable[..., None]) -> Iterator[None]:
    """Call this function for each launch, with the method that launches and its arguments."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kind = InterpretedFunction if uses_interpreter() else JITFunction
    run = kind.run
    kind.run = lambda kernel, *args, **named: launch(run, kernel, *args, **named)
    try:
        yield
    finally:
        kind.run = run


@contextmanager
def kernels_on(device: FakeDevice) -> Iterator[set[str]]:
    """Launch interpreted kernels on a simulated device; yields the names of those launched."""
    from triton.runtime.interpreter import InterpretedFunction

    interpret, names = InterpretedFunction.run, set[str]()

    def run(kernel: Any, *args: Any, **named: Any) -> None:
        names.add(kernel.fn.__name__)
        plain_args, plain_named = change_all((args, named), reveal)
        device.launch(
            lambda: interpret(kernel, *plain_args, **plain_named),
            device_tensors((args, named)),
            device.costs.launch_s,
        )

    InterpretedFunction.run = run
    try:
        yield names
    finally:
        InterpretedFunction.run = interpret
