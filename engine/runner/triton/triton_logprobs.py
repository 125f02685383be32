"""Logprobs in Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from baton.engine.runner.triton.launching import launch
from baton.engine.runner.triton.sampling_kernels import log_softmax_kernel

MAX_ROW_COLUMNS = 2048  # of logits, that the program of a row reads at a time
ROW_WARPS = 16
MAX_INT32 = (1 << 31) - 1


def log_softmax(logits: Tensor) -> Tensor:
    logprobs = torch.empty_like(logits, memory_format=torch.contiguous_format)
    num_rows, size = logits.shape
    launch(
        log_softmax_kernel,
        (num_rows,),
        logprobs,
        logits,
        logits.stride(0),
        size,
        num_columns=row_columns(size),
        num_warps=ROW_WARPS,
    )
    return logprobs


def find_tops(logprobs: Tensor, num_tops: int) -> Tensor:
    """Return the ids of the top tokens of each row, of equal ones those with the lowest ids.

    They are those of the greatest integers. No two are equal, since each ends with its token's
    place from the end, so that no order among equal ones can depend on the batch.
    """
    bits, size = logprobs.view(torch.int32), logprobs.shape[1]
    ordered = torch.where(bits < 0, bits ^ MAX_INT32, bits).long()
    places = torch.arange(size - 1, -1, -1, device=bits.device)
    tops = ((ordered << 32) | places).topk(min(num_tops, size), dim=-1).values
    return size - 1 - (tops & MAX_INT32)


def row_columns(size: int) -> int:
    """Return the columns of a row that a program reads at a time."""
    padded_size: int = triton.next_power_of_2(size)
    return min(MAX_ROW_COLUMNS, padded_size)
