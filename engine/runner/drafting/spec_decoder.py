"""Speculative decoding in the runner: proposes drafts and accepts sampled tokens.

A drafted token is computed in the same step as the token before it. The token after it is sampled
as usual, with the random numbers of its seed and position. A sampled token is accepted if all
drafted tokens before it equal the tokens sampled at their positions. So the output is the same as
without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.core.ids import RequestId
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.batch.input_batch import NO_DRAFTS, PersistentBatch, Step
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.draft_lengths import DraftLengths
from baton.engine.spec_decode.proposer import DraftRow, Drafts, Proposer


class SpecDecoder:
    """Drafts of a batch: which rows get some, and what became of them."""

    def __init__(
        self, batch: PersistentBatch, speculation: Speculation, proposer: Proposer
    ) -> None:
        self.batch, self.speculation, self.proposer = batch, speculation, proposer
        self._lengths = DraftLengths(speculation)

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        if not request_ids:
            return
        self._lengths.forget(request_ids)
        rows = filter(None, map(self.batch.find_row, request_ids))
        self.proposer.forget({row.request_id: self._draft_row(row, 0) for row in rows})

    def drafts(
        self, num_scheduled_tokens: Mapping[RequestId, int], max_draft_tokens: int
    ) -> Drafts:
        """Propose drafts for decoding rows, within the token budget and `max_rows` of the step."""
        max_tokens = self._max_tokens(num_scheduled_tokens, max_draft_tokens)
        if max_tokens <= 0:
            return NO_DRAFTS
        if not self.speculation.is_adaptive:
            return self.proposer.propose(self._rows(num_scheduled_tokens), max_tokens)
        if not self._lengths.begin_step():
            return NO_DRAFTS
        rows = self._lengths.without_pausing(self._rows(num_scheduled_tokens))
        num_scheduled = num_scheduled_tokens.values()
        if not self.speculation.looks_up:
            rows = self._lengths.choose(rows, num_scheduled, max_tokens)
            return self.proposer.propose(rows, max_tokens)
        # Choosing costs more than looking up, which often finds nothing.
        drafts = self.proposer.propose(rows, len(rows) * self.speculation.num_tokens)
        if not drafts:
            return NO_DRAFTS
        found = [
            row._replace(max_tokens=len(drafts[row.request_id]))
            for row in rows
            if row.request_id in drafts
        ]
        chosen = self._lengths.choose(found, num_scheduled, max_tokens)
        return {row.request_id: drafts[row.request_id][: row.max_tokens] for row in chosen}

    def can_draft(self, plan: Plan) -> bool:
        """Return whether `drafts` could propose any for a plan. If not, it needs no tokens."""
        return self._max_tokens(plan.num_scheduled_tokens, plan.max_draft_tokens) > 0

    def _max_tokens(
        self, num_scheduled_tokens: Mapping[RequestId, int], max_draft_tokens: int
    ) -> int:
        """Return the most tokens to propose for a step."""
        num_rows_left = self.speculation.max_rows - sum(num_scheduled_tokens.values())
        return min(num_rows_left, max_draft_tokens)

    def note_results(self, step: Step, result: RunResult, took_s: float | None) -> None:
        """Learn from a pass, and report its drafts. `took_s`, if it is known, includes these."""
        if took_s is not None and len(step.runs) == len(step.token_ids):
            self._lengths.note_pass(len(step.runs), took_s)
        for request_id, draft in step.drafts.items():
            num_accepted = max(0, len(result.token_ids.get(request_id, ())) - 1)
            self._lengths.note_accepted(request_id, len(draft), num_accepted)
            result.num_proposed[request_id] = len(draft)

    def _rows(self, num_scheduled_tokens: Mapping[RequestId, int]) -> Iterator[DraftRow]:
        for row in self.batch.decoding(num_scheduled_tokens):
            max_tokens = min(self.speculation.num_tokens, self.batch.max_draft_len(row))
            if max_tokens > 0:
                yield self._draft_row(row, max_tokens)

    def _draft_row(self, row: PlanRow, max_tokens: int) -> DraftRow:
        return DraftRow(
            row.request_id,
            self.batch.known_tokens(row.request_id),
            max_tokens,
            row.num_prompt_tokens,
            row.predicted_token_ids,
            row.prefix_keys,
        )
