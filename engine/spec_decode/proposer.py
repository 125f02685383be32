"""Proposer: makes draft tokens for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PredictionsFirst:
    """A client's prediction, where there is one, is drafted from before all else.

    A prediction that fits is accepted whole, and costs nothing to draft from.
    """

    predictions: Proposer  # of rows that have one
    others: Proposer  # of the rest, and where a prediction does not go on

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        rows = list(rows)
        predicted = [row for row in rows if row.predicted_token_ids]
        if not predicted:  # most steps
            return self.others.propose(rows, max_tokens)
        drafts = self.predictions.propose(predicted, max_tokens)
        max_tokens -= sum(map(len, drafts.values()))
        rest = [row for row in rows if row.request_id not in drafts]
        return {**drafts, **self.others.propose(rest, max_tokens)} if max_tokens else drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.predictions.forget(rows)
        self.others.forget(rows)
