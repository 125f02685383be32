"""Speculation in the runner: drafts for the rows that decode, and which of what was sampled counts.

A drafted token is computed in the same step as the token before it, and sampled behind like any
other, with the randomness of its seed and position. What was sampled in a place counts if all
drafted tokens before it are what was sampled in theirs, so the answer is what it would have
been without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.drafts import Drafter
from engine.plan import RunResult
from engine.request import RequestId
from engine.runner.batch import PersistentBatch, RowFacts
from engine.runner.layout import Ints
from engine.runner.sampler import Choice
from engine.speculation import Speculation

Drafts = Mapping[RequestId, Sequence[int]]


class DraftedRows:
    def __init__(self, batch: PersistentBatch, speculation: Speculation) -> None:
        self._batch = batch
        self._speculation = speculation
        self._drafter = Drafter(speculation)

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        self._drafter.forget(request_ids)

    def drafts(
        self, num_scheduled_tokens: Mapping[RequestId, int], max_draft_tokens: int
    ) -> Drafts:
        """As long as the step has budget, and room for more rows without being slower."""
        num_rows_left = self._speculation.max_rows - sum(num_scheduled_tokens.values())
        num_left = min(num_rows_left, max_draft_tokens)
        drafts: dict[RequestId, Sequence[int]] = {}
        if num_left <= 0:
            return drafts
        for row in self._batch.decoding(num_scheduled_tokens):
            if row.sampling.structured_outputs is not None:
                continue  # a grammar that has followed a wrong draft could not go back
            most = min(num_left, self._speculation.num_tokens, self._batch.room_for_draft(row))
            draft = self._draft(row, most) if most > 0 else []
            if draft:
                drafts[row.request_id] = draft
                num_left -= len(draft)
            if not num_left:
                break
        return drafts

    def judge(self, drafts: Drafts, result: RunResult) -> None:
        for request_id, draft in drafts.items():
            num_accepted = max(0, len(result.token_ids.get(request_id, ())) - 1)
            self._drafter.judged(request_id, len(draft), num_accepted)
            result.num_proposed[request_id] = len(draft)

    def _draft(self, row: RowFacts, most: int) -> list[int]:
        known: Ints = self._batch.known_tokens(row)
        return self._drafter.draft(
            row.request_id, lambda first, count: known[first : first + count].tolist(), most
        )


def standing(rows: Sequence[RowFacts], choices: Sequence[Choice], drafts: Drafts) -> Sequence[int]:
    """The places whose choices count. A row's places are in the order of its tokens."""
    if not drafts:
        return range(len(rows))
    places: list[int] = []
    num_standing: dict[RequestId, int] = {}
    broken: set[RequestId] = set()
    for place, (row, choice) in enumerate(zip(rows, choices, strict=True)):
        request_id = row.request_id
        if request_id in broken:
            continue
        draft, num_before = drafts.get(request_id, ()), num_standing.get(request_id, 0)
        if choice.token_id is None and num_before:
            broken.add(request_id)  # the tokens before it are good; the next step meets it again
            continue
        places.append(place)
        num_standing[request_id] = num_before + 1
        if num_before == len(draft) or draft[num_before] != choice.token_id:
            broken.add(request_id)
    return places
