"""Tensors in the memory of a simulated device, and the arguments of operations on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

PLACE = torch.device("meta")  # the only device besides the CPU that torch always has


class Allocation:
    """Owner of device memory; views share it."""


class DeviceTensor(Tensor):
    """Tensor whose numbers the CPU cannot access."""

    hidden: Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, hidden: Tensor, allocation: Allocation) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            hidden.size(),
            strides=hidden.stride(),
            storage_offset=hidden.storage_offset(),
            dtype=hidden.dtype,
            device=PLACE,
        )

    def __init__(self, hidden: Tensor, allocation: Allocation) -> None:
        self.hidden = hidden
        self.allocation = allocation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_view(func):  # for threads that make copies
            [viewed] = device_tensors((args, kwargs or {}))
            args, kwargs = change_all((args, kwargs or {}), reveal)
            return cls(func(*args, **kwargs), viewed.allocation)
        raise RuntimeError(f"{func} on memory of the device, outside of its `with` block")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.hidden.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operation consists of others."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def is_view(func: Any) -> bool:
    """Return whether an operation only describes the memory of a tensor in another way."""
    [*returns] = func._schema.returns
    return not func._schema.is_mutable and len(returns) == 1 and returns[0].alias_info is not None


def change_all(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to all values in lists, tuples and dicts."""
    if isinstance(value, dict):
        return {name: change_all(each, change) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change_all(each, change) for each in value])
    if type(value) in (list, tuple):
        return type(value)([change_all(each, change) for each in value])
    return change(value)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors(each)]
    return []


def device_tensors(value: Any) -> list[DeviceTensor]:
    return [each for each in tensors(value) if isinstance(each, DeviceTensor)]


def describe(value: Any) -> object:
    """Return what the shapes of an operation's outputs depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(describe, value))
    return type(value), value


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def reveal(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.hidden if isinstance(value, DeviceTensor) else value


def as_meta(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor) or not value.dim():
        return value.to("meta") if isinstance(value, Tensor) else value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def fill_with_garbage(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 6)
