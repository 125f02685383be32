"""Number of launches on a device: what a graph saves."""

from __future__ import annotations

from contextvars import ContextVar, Token
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class LaunchCounter(TorchDispatchMode):
    """Counts launches inside of its `with` block: operations of torch, and kernels.

    An operation counts once, even if it launches several kernels, as a sort does. Copies between
    host and device do not count.
    """

    def __init__(self, place: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = place.type
        self._tokens: list[Token[LaunchCounter | None]] = []
        self.num_launches = 0

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._tokens.append(_COUNTER.set(self))
        return self

    def __exit__(self, *error: Any) -> None:
        _COUNTER.reset(self._tokens.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        is_copy = func in _COPIES and not self._are_on_device((args, result))
        if _computes(func) and not is_copy and self._is_on_device(result):
            self.num_launches += 1
        return result

    def _is_on_device(self, value: object) -> bool:
        return any(kind == self._kind for kind in _kinds(value))

    def _are_on_device(self, value: object) -> bool:
        return all(kind == self._kind for kind in _kinds(value))


_COUNTER: ContextVar[LaunchCounter | None] = ContextVar("launch counter", default=None)


def count_kernel() -> None:
    """Count the launch of a kernel that torch does not launch."""
    counter = _COUNTER.get()
    if counter is not None:
        counter.num_launches += 1


def _kinds(value: object) -> list[str]:
    return [leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@cache
def _is_composite(func: Any) -> bool:
    """Return whether an operation consists of others."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@cache
def _computes(func: Any) -> bool:
    """Return False for views, and for memory that is not written."""
    aliases = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and not func.name().startswith(("aten::empty", "aten::new_empty"))
