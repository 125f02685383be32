"""Logprobs in Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from baton.engine.runner.device.step_memory import Memory
from baton.engine.runner.sampling.logprobs import LogprobTensors
from baton.engine.runner.triton.launching import launch
from baton.engine.runner.triton.sampling.logprob_kernels import logprobs_kernel

MAX_ROW_COLUMNS = 2048  # of logits, that the program of a row reads at a time
ROW_WARPS = 16


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, num_tops: int, rows: Tensor | None, memory: Memory
) -> LogprobTensors:
    """Compute logprobs of chosen and top tokens; of equal ones, the lowest ids come first."""
    size = logits.shape[1]
    num_rows = len(logits) if rows is None else len(rows)
    num_tops = min(num_tops, size)

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return memory.take(f"logprobs: {name}", logits, shape, dtype)

    computed = LogprobTensors(
        take("token ids", (num_rows,), torch.int64),
        take("chosen", (num_rows,), torch.float32),
        take("ranks", (num_rows,), torch.int64),
        take("top token ids", (num_rows, num_tops), torch.int64),
        take("top", (num_rows, num_tops), torch.float32),
    )
    num_columns = row_columns(size)
    launch(
        logprobs_kernel,
        (num_rows,),
        *computed,
        logits,
        token_ids,
        token_ids if rows is None else rows,
        int(rows is not None),
        logits.stride(0),
        size,
        num_tops,
        num_pieces=triton.next_power_of_2(triton.cdiv(size, num_columns)),
        num_columns=num_columns,
        num_warps=ROW_WARPS,
    )
    return computed


def row_columns(size: int) -> int:
    """Return the columns of a row that a program reads at a time."""
    padded_size: int = triton.next_power_of_2(size)
    return min(MAX_ROW_COLUMNS, padded_size)
