"""Predictions in front of another proposer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from baton.core.ids import RequestId
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts, PredictionsFirst
from baton.engine.spec_decode.suffix_proposer import SuffixProposer

PREDICTION = (11, 12, 13, 14, 15)


@dataclass
class Constant:
    """Proposes the same token for each row, and keeps what it was asked."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        rows = list(rows)
        self.asked += [(row.request_id, max_tokens) for row in rows]
        return {row.request_id: [99] for row in rows}

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.forgotten += rows


def row_of(name: str, *outputs: int, predicted: tuple[int, ...] = PREDICTION) -> DraftRow:
    known = np.array([1, 2, 3, *outputs], dtype=np.int64)
    return DraftRow(RequestId(name), known, 3, 3, predicted)


def test_a_row_is_drafted_from_its_prediction_while_that_goes_on() -> None:
    others = Constant()
    both = PredictionsFirst(SuffixProposer(Speculation(3)), others)

    drafts = both.propose([row_of("fits", 11), row_of("none", 11, predicted=())], 8)

    assert drafts == {"fits": [12, 13, 14], "none": [99]}
    assert others.asked == [("none", 5)]
    assert both.propose([row_of("left", 11, 70, 71, 72)], 8) == {"left": [99]}


def test_nothing_is_asked_for_more_tokens_than_are_left() -> None:
    others = Constant()
    both = PredictionsFirst(SuffixProposer(Speculation(3)), others)

    drafts = both.propose([row_of("fits", 11), row_of("none", 11, predicted=())], 3)

    assert drafts == {"fits": [12, 13, 14]}
    assert not others.asked


def test_both_forget_rows_that_have_ended() -> None:
    others = Constant()
    both = PredictionsFirst(SuffixProposer(Speculation(3)), others)
    both.propose([row_of("a", 11)], 3)

    both.forget({RequestId("a"): row_of("a", 11)})

    assert others.forgotten == ["a"]
