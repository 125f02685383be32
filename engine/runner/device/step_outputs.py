"""Results of a step on the host: all of its tensors in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.runner.device.step_inputs import Array


def to_host(tensors: Sequence[Tensor]) -> list[Array]:
    """Return tensors of a step as arrays on the host.

    On the CPU they share the memory of the tensors. From a GPU they come in a single transfer,
    which waits for the work that computes them.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    # Larger numbers first, so that all are aligned.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    parts = [tensors[index].contiguous().flatten().view(torch.uint8) for index in order]
    packed = torch.cat(parts).cpu()
    arrays: dict[int, Array] = {}
    for index, part in zip(order, packed.split([part.numel() for part in parts]), strict=True):
        tensor = tensors[index]
        arrays[index] = part.view(tensor.dtype).view(tensor.shape).numpy()
    return [arrays[index] for index in range(len(tensors))]
