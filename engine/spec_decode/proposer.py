"""Proposer: makes draft tokens for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.core.ids import NO_PREFIX_KEYS, PrefixKeys, RequestId

Drafts = Mapping[RequestId, Sequence[int]]


class DraftRow(NamedTuple):
    """A sequence whose newest token is computed in the next pass, or one that has ended."""

    request_id: RequestId
    known_tokens: npt.NDArray[np.int64]  # a view: prompt and outputs
    max_tokens: int  # that can be drafted
    num_prompt_tokens: int = 0
    predicted_token_ids: tuple[int, ...] = ()  # by the client
    prefix_keys: PrefixKeys = NO_PREFIX_KEYS  # of the requests that see its answer later


class Proposer(Protocol):
    """Proposes tokens before a pass."""

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        """Return drafts for some of the rows, of at most `max_tokens` tokens in total."""
        ...

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        """Forget sequences, which have these last tokens. Unknown ones are ignored."""
        ...
