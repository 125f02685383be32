"""Logprobs of chosen and top tokens, computed on the device and read together with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from baton.core.logprobs import TokenLogprobs
from baton.engine.runner.device.step_inputs import Array


class LogprobTensors(NamedTuple):
    """Logprobs of rows of logits, on the device. Fields are by row."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor  # [rows, top tokens]
    top_logprobs: Tensor


def gather_logprobs(logprobs: Tensor, token_ids: Tensor, top_token_ids: Tensor) -> LogprobTensors:
    """Gather the logprobs of these tokens from [rows, vocab_size], and their ranks."""
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top_logprobs = logprobs.gather(1, top_token_ids)
    return LogprobTensors(token_ids, chosen.squeeze(1), ranks, top_token_ids, top_logprobs)


def read_logprobs(arrays: Sequence[Array], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """Build the logprobs of each row. `arrays`: those of LogprobTensors, on the host."""
    *columns, top_token_ids, top_logprobs = (array.tolist() for array in arrays)
    tops = zip(num_tops, top_token_ids, top_logprobs, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, (num, ids, values) in zip(*columns, tops, strict=True)
    ]
