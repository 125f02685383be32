"""Proposer: makes draft tokens for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.core.ids import RequestId

Drafts = Mapping[RequestId, Sequence[int]]


class DraftRow(NamedTuple):
    """A sequence whose newest token is computed in the next pass."""

    request_id: RequestId
    known_tokens: npt.NDArray[np.int64]  # a view: prompt and outputs
    max_tokens: int  # that can be drafted


class Proposer(Protocol):
    """Proposes tokens before a pass, and learns from its results."""

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        """Return drafts for some of the rows, of at most `max_tokens` tokens in total."""
        ...

    def note_accepted(self, request_id: RequestId, num_proposed: int, num_accepted: int) -> None:
        """Report the result of a draft."""
        ...

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences. Unknown ones are ignored."""
        ...
