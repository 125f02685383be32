"""Memory for results that a step overwrites."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Memory:
    """Memory that is new each time."""

    def take(self, name: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory on the device of `like`. What it holds is undefined."""
        return like.new_empty(shape, dtype=dtype)


NEW_MEMORY = Memory()


class StepMemory(Memory):
    """Memory of a step: each gets that of the one before, by name, if it is large enough.

    The name belongs to one dtype. Work that reads the memory is launched before the next step.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size, held = math.prod(shape), self._held.get(name)
        if held is None or size > len(held):
            held = self._held[name] = like.new_empty(size, dtype=dtype)
        return held[:size].view(*shape)
