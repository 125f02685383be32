"""Tensors that pretend to be on a GPU, and a count of the copies between it and the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baton.engine.runner.host_memory import free_host_bytes
from baton.kv_transfer.fence import PASSED, Fence

GPU = torch.device("cuda", 0)
# Functions that wait for the device: they return numbers, or a tensor whose size is one of them.
READS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "equal", "allclose", "nonzero", "unique", "unique_consecutive", "masked_select",
    "argwhere", "bincount", "repeat_interleave",
}  # fmt: skip


class DeviceTensor(Tensor):
    """Tensor in host memory that pretends to be on a GPU, inside a `TransferCounter` block."""

    # The counter's applies.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


class HostRead(AssertionError):
    """Code waited for the device outside of a copy to the host."""


class TransferCounter(TorchFunctionMode):
    """Counts copies to the device and to the host; raises HostRead if anything else waits.

    Operations run on the CPU, also those of Triton's interpreter. Operands on the host count as
    copies unless they have no dimension. Implements the parts of `Device` that inputs need.
    """

    place = GPU
    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.num_to_device = 0
        self.num_to_host = 0

    def put(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device with this content. Not counted."""
        return tensor.as_subclass(DeviceTensor)

    def take(self, tensor: Tensor) -> Tensor:
        """Return the content of a tensor on the device. Not counted."""
        return tensor.as_subclass(Tensor)

    def pin(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record(self) -> Fence:
        return PASSED

    def drain(self) -> None:
        """Return at once: all work is already done."""

    def free_bytes(self) -> int:
        return free_host_bytes()

    def make_graph_pool(self) -> None:
        return None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensors = _tensors((args, named))
        is_on_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        target = _target_device(name, args, named)
        if is_on_device:
            self._check(name, args, tensors)
        plain_args, plain_named = _to_plain((args, named))
        output = func(*plain_args, **plain_named)
        is_to_host = target is not None and target.type == "cpu"
        if is_on_device and is_to_host:
            self.num_to_host += 1
            return output.clone()
        if target == GPU and not is_on_device and (tensors or name in ("tensor", "as_tensor")):
            self.num_to_device += 1
            output = output.clone()
        return _to_device(output) if is_on_device or target == GPU else output

    def _check(self, name: str, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Count operands that are copied to the device, and refuse operations that wait for it."""
        is_mask = name in ("__getitem__", "__setitem__") and any(
            tensor.dtype is torch.bool for tensor in _tensors(args[1])
        )
        if name in READS or is_mask or (name == "where" and len(args) == 1):
            raise HostRead(f"{name} waits for the device")
        if name in ("__getitem__", "__setitem__") and _has_list(args[1]):
            self.num_to_device += 1
        on_host = [each for each in tensors if not isinstance(each, DeviceTensor) and each.ndim]
        self.num_to_device += len(on_host)


def on_plain_tensors(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launch by Triton's interpreter, whose copies of its own are not counted."""

    def launch_plain(*arguments: Any, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(*_to_plain(arguments), **options)

    return launch_plain


def _target_device(
    name: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> torch.device | None:
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        return GPU
    device = named.get("device")
    if name == "to" and device is None:
        device = next((arg for arg in args[1:] if isinstance(arg, str | torch.device)), None)
    return None if device is None else torch.device(device)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _has_list(index: Any) -> bool:
    """Return whether an index contains a list of numbers, which becomes a tensor on the host."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(each, change) for each in value))
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_map(each, change) for each in value])
    return change(value)


def _to_plain(value: Any) -> Any:
    """Replace tensors on the device by plain ones with the same memory, and the GPU by the CPU."""

    def change(each: Any) -> Any:
        if isinstance(each, DeviceTensor):
            return each.as_subclass(Tensor)
        return torch.device("cpu") if each == GPU else each

    return _map(value, change)


def _to_device(value: Any) -> Any:
    def change(each: Any) -> Any:
        return each.as_subclass(DeviceTensor) if isinstance(each, Tensor) else each

    return _map(value, change)
