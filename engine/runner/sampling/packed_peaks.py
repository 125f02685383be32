"""Argmax and finiteness of rows of logits in one array, which is copied to the host as it is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.device.step_inputs import Array
from baton.engine.runner.model.ops import Peaks

ID_BYTES = 8


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
