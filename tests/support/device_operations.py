"""Operations of torch on a simulated device: each is a launch, a copy or a view."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.device_tensors import (
    PLACE,
    DeviceTensor,
    as_meta,
    change_all,
    describe,
    device_tensors,
    is_composite,
    is_tensor,
    reveal,
    tensors,
)

if TYPE_CHECKING:
    from tests.support.fake_device import FakeDevice

PACKAGE = "/engine/"
CAPTURING = "not permitted while a graph is captured"


class DeviceOperations(TorchDispatchMode):
    """Turns operations into work of a device, inside of its `with` block."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._factories = _CopiedFactories()
        self._known_shapes: dict[object, Any] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._factories.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._factories.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def _parts(self) -> Iterator[None]:
        """Intercept the operations of which one consists."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
            return self._dispatch(func, args, kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        used = device_tensors((args, kwargs))
        options = (*args, *kwargs.values())
        names_device = any(isinstance(each, torch.device) and each == PLACE for each in options)
        if not used and not names_device:
            return func(*args, **kwargs)
        if is_composite(func):
            with self._parts():
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args, **kwargs)
        return self._operate(func, args, kwargs, used)

    def _operate(self, func: Any, args: Any, kwargs: Any, used: list[DeviceTensor]) -> Any:
        if len(used) < len(tensors((args, kwargs))):
            args, kwargs = change_all((args, kwargs), self._send_index)
            used = device_tensors((args, kwargs))
        hidden_args, hidden_kwargs = change_all((args, kwargs), reveal)
        aliases = [each.alias_info for each in func._schema.returns]
        if func._schema.is_mutable:
            self._device.launch(
                lambda: func(*hidden_args, **hidden_kwargs), used, self._device.costs.launch_s
            )
            written = [
                kwargs.get(own.name, args[index] if index < len(args) else None)
                for index, own in enumerate(func._schema.arguments)
                if own.alias_info is not None and own.alias_info.is_write
            ]
            return written[0] if len(written) == 1 else tuple(written)
        if any(alias is not None for alias in aliases):
            allocation = used[0].allocation
            views = func(*hidden_args, **hidden_kwargs)
            return change_all(views, lambda view: DeviceTensor(view, allocation))
        return self._compute(func, (hidden_args, hidden_kwargs), used)

    def _compute(self, func: Any, given: Any, used: list[DeviceTensor]) -> Any:
        """Launch a function that returns new tensors."""
        args, kwargs = given
        outputs = change_all(
            self._shapes(func, given),
            lambda each: self._device.allocate(each) if is_tensor(each) else each,
        )
        made = device_tensors(outputs)
        if not made or "empty" in func.name():  # which leaves garbage
            return outputs
        hidden = [each.hidden for each in made]

        def run() -> None:
            for dst, src in zip(hidden, tensors(func(*args, **kwargs)), strict=True):
                dst.copy_(src)

        self._device.launch(run, [*used, *made], self._device.costs.launch_s)
        return outputs

    def _shapes(self, func: Any, given: Any) -> Any:
        """Return outputs without numbers, after a wait if their shapes depend on numbers."""
        key = func, *map(describe, given[0]), *map(describe, given[1].items())
        if key not in self._known_shapes:
            args, kwargs = change_all(given, as_meta)
            try:
                self._known_shapes[key] = func(*args, **kwargs)
            except (NotImplementedError, RuntimeError):
                self._known_shapes[key] = None
        if self._known_shapes[key] is not None:
            return self._known_shapes[key]
        self._device.counts.copies_out.append(caller())
        self._device.synchronize()
        return func(*given[0], **given[1])

    def _send_index(self, argument: Any) -> Any:
        """Copy a tensor of the CPU, such as an index, to the device; numbers stay as they are."""
        is_on_host = is_tensor(argument) and not isinstance(argument, DeviceTensor)
        return self._send(argument, is_async=False) if is_on_host and argument.dim() else argument

    def _to_copy(self, source: Tensor, **options: Any) -> Tensor:
        device = options.pop("device", None) or source.device
        is_async = options.pop("non_blocking", False)
        dtype = options.pop("dtype", None) or source.dtype
        if device == PLACE and not isinstance(source, DeviceTensor):
            return self._send(source.to(dtype), is_async=is_async)
        assert isinstance(source, DeviceTensor)
        if device == PLACE:
            copy = torch.ops.aten._to_copy.default
            return cast(
                "Tensor", self._compute(copy, ((source.hidden,), {"dtype": dtype}), [source])
            )
        dst = torch.empty_like(source.hidden, dtype=dtype)
        self._receive(dst, source, is_async=is_async)
        return dst

    def _copy(self, dst: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(dst, DeviceTensor):
            assert isinstance(source, DeviceTensor)
            self._receive(dst, source, is_async=non_blocking)
        elif not isinstance(source, DeviceTensor):
            self._send_to(dst, source, is_async=non_blocking)
        else:
            hidden, from_hidden = dst.hidden, source.hidden
            self._device.launch(
                lambda: hidden.copy_(from_hidden), [dst, source], self._device.costs.launch_s
            )
        return dst

    def _send(self, source: Tensor, *, is_async: bool) -> DeviceTensor:
        dst = self._device.allocate(source)
        self._send_to(dst, source, is_async=is_async)
        return dst

    def _send_to(self, dst: DeviceTensor, source: Tensor, *, is_async: bool) -> None:
        """Copy from the CPU. Pinned memory is read when the copy lands, as a DMA engine does."""
        self._device.counts.copies_in.append(caller())
        is_pinned = self._device.is_pinned(source)
        if self._device.is_capturing and not (is_async and is_pinned):
            raise RuntimeError(f"a copy of pageable memory {CAPTURING}")
        read, hidden = source if is_pinned and is_async else source.clone(), dst.hidden
        self._device.launch(lambda: hidden.copy_(read), [dst], self._device.costs.copy_s)
        if not is_async:
            self._device.synchronize()

    def _receive(self, dst: Tensor, source: DeviceTensor, *, is_async: bool) -> None:
        """Copy to the CPU. Until a non-blocking copy lands, the memory there is unchanged."""
        self._device.counts.copies_out.append(caller())
        if not is_async:
            self._device.synchronize()
        hidden = source.hidden
        self._device.launch(lambda: dst.copy_(hidden), [source], self._device.costs.copy_s)
        if not is_async:
            self._device.wait()


class _CopiedFactories(TorchFunctionMode):
    """Makes tensors of numbers of Python on the CPU first, and copies them, as devices do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == PLACE:
            del kwargs["device"]
            return func(*args, **kwargs).to(PLACE)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], DeviceTensor):
            args = (args[0], _as_tensors(args[1]), *args[2:])
        return func(*args, **kwargs)


def _as_tensors(index: Any) -> Any:
    """Make the lists of an index tensors of the CPU."""
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    return torch.tensor(index, dtype=torch.int64) if isinstance(index, list) else index


def caller() -> str:
    """Return the innermost function of the engine on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if PACKAGE in code.co_filename and "/tests/" not in code.co_filename:
            return f"{code.co_filename.rsplit(PACKAGE, 1)[1]}:{code.co_name}"
        frame = frame.f_back
    return "test"
