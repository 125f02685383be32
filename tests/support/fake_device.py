"""Simulated asynchronous device with its own memory, on which torch computes.

Tensors of the device hold their numbers in hidden CPU tensors, which only launched work reads and
writes. Work lands in order, when its time on the simulated clock has come: the CPU waits for it
(synchronises), or the test advances the clock. Memory that no work has written yet is garbage.

As on CUDA, a copy is asynchronous only if it is non-blocking and the host memory is pinned, and
what needs the numbers (`tolist`, `nonzero`) waits for all work. A graph records work instead of
doing it, and then reads and writes the memory of its capture, whatever became of it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.runner.device.device import Graph, GraphPool, MemoryProfile
from baton.kv_transfer.fence import Fence

PLACE = torch.device("meta")  # the only device besides the CPU that torch always has
CAPTURING = "not permitted while a graph is captured"
PACKAGE = "/engine/"


@dataclass(frozen=True, slots=True)
class Costs:
    """Times on the simulated clock."""

    launch_s: float = 1e-6
    copy_s: float = 1e-5
    replay_s: float = 1e-6


@dataclass(slots=True)
class Counts:
    launches: int = 0
    replays: int = 0
    allocations: int = 0
    copies_in: list[str] = field(default_factory=list)  # by the code that made them
    copies_out: list[str] = field(default_factory=list)
    synchronizations: list[str] = field(default_factory=list)


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
        raise RuntimeError(f"{func} on memory of the device, outside of its `with` block")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.hidden.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Work(NamedTuple):
    end_s: float
    run: Callable[[], object]


class Recorded(NamedTuple):
    """Work of a graph."""

    run: Callable[[], object]
    reads: tuple[weakref.ref[Allocation], ...]  # memory from outside of the graph's pool


class FakeDevice(TorchDispatchMode):
    """Implements `Device`. Computes inside of its `with` block."""

    place = PLACE
    shares_host_memory = False

    def __init__(self, *, costs: Costs = Costs(), memory_bytes: int = 1 << 30) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._factories = _CopiedFactories()
        self.costs = costs
        self.counts = Counts()
        self.now_s = 0.0
        self.fails_at_launch: int | None = None  # counted from one
        self.has_graphs = True
        self.memory_bytes = memory_bytes
        self._used_bytes = self._most_used_bytes = 0
        self._free_at_s = 0.0  # when all launched work is done
        self._queue: deque[Work] = deque()
        self._num_launched = self._num_landed = 0
        self._recorded: list[Recorded] | None = None
        self._captured: list[Allocation] = []
        self._known_shapes: dict[object, Any] = {}
        self._pinned_ranges: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._factories.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._factories.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def _operations(self) -> Iterator[None]:
        """Intercept the operations of which one consists."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # --- Device -----------------------------------------------------------------------------------

    def pin(self, num_bytes: int) -> Tensor:
        made = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
        self._pinned_ranges.append((made.data_ptr(), made.data_ptr() + num_bytes))
        return made

    def record(self) -> Fence:
        return FakeFence(self, self._num_launched, self._free_at_s)

    def drain(self) -> None:
        self.synchronize()

    def free_bytes(self) -> int:
        return self.memory_bytes - self._used_bytes

    def profile(self, run: Callable[[], None]) -> MemoryProfile | None:
        own = self._most_used_bytes = self._used_bytes
        run()
        self.synchronize()
        added = self._most_used_bytes - own
        return MemoryProfile(self.memory_bytes, self.free_bytes(), own, added)

    def make_graph_pool(self) -> GraphPool | None:
        return FakeGraphPool(self) if self.has_graphs else None

    # --- the clock --------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass, and land the work that is done by then."""
        self.now_s += seconds
        with torch.inference_mode(mode=False), torch.no_grad():
            while self._queue and self._queue[0].end_s <= self.now_s:
                self._queue.popleft().run()
                self._num_landed += 1

    def synchronize(self) -> None:
        """Let the CPU wait for all launched work."""
        if self._recorded is not None:
            raise RuntimeError(f"synchronisation {CAPTURING}")
        self.counts.synchronizations.append(caller())
        self.advance(max(0.0, self._free_at_s - self.now_s))

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def has_landed(self, num_launched: int) -> bool:
        self.advance(0.0)
        return self._num_landed >= num_launched

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of what is in the memory now, for a test."""
        assert isinstance(tensor, DeviceTensor)
        return tensor.hidden.clone()

    # --- launches ---------------------------------------------------------------------------------

    def launch(
        self, run: Callable[[], object], used: Sequence[DeviceTensor], cost_s: float
    ) -> None:
        self.counts.launches += 1
        if self.counts.launches == self.fails_at_launch:
            raise RuntimeError("launch failed, as the test wants")
        if self._recorded is not None:
            inside = set(self._captured)
            reads = {each.allocation for each in used} - inside
            self._recorded.append(Recorded(run, tuple(weakref.ref(each) for each in reads)))
            return
        self.enqueue(run, cost_s)

    def enqueue(self, run: Callable[[], object], cost_s: float) -> None:
        self._free_at_s = max(self.now_s, self._free_at_s) + cost_s
        self._queue.append(Work(self._free_at_s, run))
        self._num_launched += 1

    def allocate(self, like: Tensor) -> DeviceTensor:
        """Return garbage in the shape of a tensor."""
        num_bytes = like.numel() * like.element_size()
        if num_bytes > self.free_bytes():
            raise torch.OutOfMemoryError(f"{num_bytes} bytes of {self.free_bytes()} that are free")
        self.counts.allocations += 1
        hidden = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        fill_with_garbage(hidden)
        allocation = Allocation()
        self._used_bytes += num_bytes
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        weakref.finalize(allocation, self._release, num_bytes)
        if self._recorded is not None:
            self._captured.append(allocation)
        return DeviceTensor(hidden, allocation)

    def _release(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes

    @contextmanager
    def recording(self) -> Iterator[tuple[list[Recorded], list[Allocation]]]:
        """Record launches instead of doing them; yields them, and the memory that they allocate."""
        self._recorded, self._captured = [], []
        try:
            yield self._recorded, self._captured
        finally:
            self._recorded, self._captured = None, []

    # --- operations of torch ----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        used = device_tensors((args, kwargs))
        options = (*args, *kwargs.values())
        names_device = any(isinstance(each, torch.device) and each == PLACE for each in options)
        if not used and not names_device:
            return func(*args, **kwargs)
        if is_composite(func):
            with self._operations():
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
            self.launch(lambda: func(*hidden_args, **hidden_kwargs), used, self.costs.launch_s)
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
            self._shapes(func, given), lambda each: self.allocate(each) if is_tensor(each) else each
        )
        made = device_tensors(outputs)
        if not made or "empty" in func.name():  # which leaves garbage
            return outputs
        hidden = [each.hidden for each in made]

        def run() -> None:
            for dst, src in zip(hidden, tensors(func(*args, **kwargs)), strict=True):
                dst.copy_(src)

        self.launch(run, [*used, *made], self.costs.launch_s)
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
        self.counts.copies_out.append(caller())
        self.synchronize()
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
            self.launch(lambda: hidden.copy_(from_hidden), [dst, source], self.costs.launch_s)
        return dst

    def _send(self, source: Tensor, *, is_async: bool) -> DeviceTensor:
        dst = self.allocate(source)
        self._send_to(dst, source, is_async=is_async)
        return dst

    def _send_to(self, dst: DeviceTensor, source: Tensor, *, is_async: bool) -> None:
        """Copy from the CPU. Pinned memory is read when the copy lands, as a DMA engine does."""
        self.counts.copies_in.append(caller())
        is_pinned = self._is_pinned(source)
        if self._recorded is not None and not (is_async and is_pinned):
            raise RuntimeError(f"a copy of pageable memory {CAPTURING}")
        read, hidden = source if is_pinned and is_async else source.clone(), dst.hidden
        self.launch(lambda: hidden.copy_(read), [dst], self.costs.copy_s)
        if not is_async:
            self.synchronize()

    def _receive(self, dst: Tensor, source: DeviceTensor, *, is_async: bool) -> None:
        """Copy to the CPU. Until a non-blocking copy lands, the memory there is unchanged."""
        self.counts.copies_out.append(caller())
        if not is_async:
            self.synchronize()
        hidden = source.hidden
        self.launch(lambda: dst.copy_(hidden), [source], self.costs.copy_s)
        if not is_async:
            self.advance(max(0.0, self._free_at_s - self.now_s))

    def _is_pinned(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(begin <= first < end for begin, end in self._pinned_ranges)


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


class FakeFence:
    def __init__(self, device: FakeDevice, num_launched: int, end_s: float) -> None:
        self._device = device
        self._num_launched = num_launched
        self._end_s = end_s

    @property
    def is_passed(self) -> bool:
        return self._device.has_landed(self._num_launched)

    def wait(self) -> None:
        """Wait; a fence that has passed costs no synchronisation."""
        if not self.is_passed:
            self._device.counts.synchronizations.append(caller())
            self._device.advance(max(0.0, self._end_s - self._device.now_s))


class FakeGraphPool:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture(self, run: Callable[[], None]) -> Graph:
        with self._device.recording() as (recorded, allocations):
            run()
        return FakeGraph(self._device, recorded, allocations)


class FakeGraph:
    """Recorded work. Its memory lives as long as it does; that of others can be freed before."""

    def __init__(
        self, device: FakeDevice, recorded: Sequence[Recorded], allocations: Sequence[Allocation]
    ) -> None:
        self._device = device
        self._recorded = tuple(recorded)
        self._allocations = tuple(allocations)

    def replay(self) -> None:
        for work in self._recorded:
            if any(read() is None for read in work.reads):
                raise RuntimeError("a graph uses memory that was freed after its capture")
        self._device.counts.replays += 1
        for work in self._recorded:
            self._device.enqueue(work.run, self._device.costs.replay_s)


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operation consists of others."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def change_all(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to all values in lists, tuples and dicts."""
    if isinstance(value, dict):
        return {name: change_all(each, change) for name, each in value.items()}
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


def caller() -> str:
    """Return the innermost function of the engine on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if PACKAGE in code.co_filename and "/tests/" not in code.co_filename:
            return f"{code.co_filename.rsplit(PACKAGE, 1)[1]}:{code.co_name}"
        frame = frame.f_back
    return "test"
