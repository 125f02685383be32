"""Proposer of several: a client's prediction, where there is one, is drafted from before all else.

A prediction that fits is accepted whole, and costs nothing to draft from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.core.ids import RequestId
from baton.engine.spec_decode.proposer import DraftRow, Drafts, Proposer


@dataclass(frozen=True, slots=True)
class PredictionsFirst:
    """Implements `Proposer`."""

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
