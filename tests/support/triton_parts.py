"""Triton parts of the runner on the CPU, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.runner.attention.paged_attention import LayerAttention, PagedAttention
from baton.engine.runner.kernels.choose import Parts, choose_parts
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.sampling.sampling import Sampling
from baton.engine.runner.state.linear_attention import LinearAttention
from baton.engine.runner.state.state_shape import StateShape
from tests.support.device_tensors import change_all, device_tensors, reveal
from tests.support.fake_device import FakeDevice


def require_triton() -> None:
    """Skip the test without Triton. Older interpreters do not run the kernels."""
    reason = "the package triton is not installed, or older than 3.9"
    pytest.importorskip("triton", minversion="3.9", reason=reason)


@cache
def interpreted_parts() -> Parts:
    return choose_parts("triton", torch.float32, torch.device("cpu"))


@cache
def batch_invariant_parts() -> Parts:
    return choose_parts("triton", torch.float32, torch.device("cpu"), batch_invariant=True)


def batch_invariant_ops() -> Ops:
    """Return operations that multiply plain matrices in Triton, too."""
    require_triton()
    return batch_invariant_parts().ops


def triton_ops() -> Ops:
    require_triton()
    return interpreted_parts().ops


def triton_attention(kv: Tensor, layers: Sequence[LayerAttention]) -> PagedAttention:
    require_triton()
    return interpreted_parts().make_attention(kv, layers)


def triton_linear_attention(kv: Tensor, shape: StateShape) -> LinearAttention:
    require_triton()
    return interpreted_parts().make_linear_attention(kv, shape)


def triton_sampling() -> Sampling:
    require_triton()
    return interpreted_parts().sampling


@contextmanager
def launched_kernels() -> Iterator[list[str]]:
    """Collect the names of interpreted kernels as they are launched."""
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    interpret = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **named: Any) -> None:
        names.append(kernel.fn.__name__)
        interpret(kernel, *args, **named)

    InterpretedFunction.run = run
    try:
        yield names
    finally:
        InterpretedFunction.run = interpret


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
