"""Logprobs of chosen and top tokens, and peaks of logits, read together from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core.output import TokenLogprobs
from baton.engine.runner.device.step_inputs import Array
from baton.engine.runner.model.ops import Peaks

ID_BYTES = 8


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


class PackedPeaks(NamedTuple):
    """Peaks of a padded batch. Token ids can be replaced by others, such as random draws."""

    packed: Tensor  # uint8: int64 token ids of all rows, then their flags
    num_padded: int  # rows

    @classmethod
    def of(cls, peaks: Peaks) -> PackedPeaks:
        packed = torch.cat([each.view(torch.uint8) for each in peaks])
        return cls(packed, len(peaks.token_ids))

    def first_rows(self, num_rows: int) -> Peaks:
        """Return views of the first rows."""
        token_ids, are_finite = self.packed.tensor_split([ID_BYTES * self.num_padded])
        return Peaks(token_ids.view(torch.int64)[:num_rows], are_finite.view(torch.bool)[:num_rows])

    def read(self, packed: Array, num_rows: int) -> tuple[Array, Array]:
        """Return token ids and flags of the first rows, once the array is on the host."""
        token_ids, are_finite = np.split(packed, [ID_BYTES * self.num_padded])
        return token_ids.view(np.int64)[:num_rows], are_finite.view(np.bool_)[:num_rows]
