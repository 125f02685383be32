"""Speculative decoding in the runner: proposes drafts and accepts sampled tokens.

A drafted token is computed in the same step as the token before it. The token after it is sampled
as usual, with the random numbers of its seed and position. A sampled token is accepted if all
drafted tokens before it equal the tokens sampled at their positions. So the output is the same as
without drafts.

No proposer can end a pass. What it proposes of no use is left out; if it fails again and again, the
node goes on without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, takewhile

from baton.core.ids import RequestId
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.batch.input_batch import NO_DRAFTS, PersistentBatch, Step
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.draft_lengths import DraftLengths
from baton.engine.spec_decode.proposer import DraftRow, Drafts, Proposer

MAX_FAILURES_IN_A_ROW = 4  # of a proposer, after which it is not asked any more

log = logging.getLogger(__name__)


class SpecDecoder:
    """Drafts of a batch: which rows get some, and what became of them."""

    def __init__(
        self,
        batch: PersistentBatch,
        speculation: Speculation,
        proposer: Proposer,
        vocab_size: int,
    ) -> None:
        self.batch, self.speculation, self.proposer = batch, speculation, proposer
        self._lengths = DraftLengths(speculation)
        self._vocab_size = vocab_size
        self._num_failures_in_a_row = 0
        self._has_warned = False  # of drafts that are left out

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        if not request_ids:
            return
        self._lengths.forget(request_ids)
        rows = filter(None, map(self.batch.find_row, request_ids))
        forgotten = {row.request_id: self._draft_row(row, 0) for row in rows}
        try:
            self.proposer.forget(forgotten)
        except Exception as failure:  # noqa: BLE001 - it is logged
            self._note_failure(failure)

    def drafts(
        self, num_scheduled_tokens: Mapping[RequestId, int], max_draft_tokens: int
    ) -> Drafts:
        """Propose drafts for decoding rows, within the token budget and `max_rows` of the step."""
        max_tokens = self._max_tokens(num_scheduled_tokens, max_draft_tokens)
        if max_tokens <= 0:
            return NO_DRAFTS
        if not self.speculation.is_adaptive:
            return self._propose(list(self._rows(num_scheduled_tokens)), max_tokens)
        if not self._lengths.begin_step():
            return NO_DRAFTS
        rows = self._lengths.without_pausing(self._rows(num_scheduled_tokens))
        num_scheduled = num_scheduled_tokens.values()
        if not self.speculation.looks_up:
            rows = self._lengths.choose(rows, num_scheduled, max_tokens)
            return self._propose(rows, max_tokens)
        # Choosing costs more than looking up, which often finds nothing.
        drafts = self._propose(rows, len(rows) * self.speculation.num_tokens)
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
        if self._has_failed:
            return 0
        num_rows_left = self.speculation.max_rows - sum(num_scheduled_tokens.values())
        return min(num_rows_left, max_draft_tokens)

    @property
    def _has_failed(self) -> bool:
        return self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW

    def _propose(self, rows: Collection[DraftRow], max_tokens: int) -> Drafts:
        """Return the drafts of the proposer, none of which can do harm."""
        if not rows:
            return NO_DRAFTS
        room = {row.request_id: row.max_tokens for row in rows}
        try:
            drafts = self.proposer.propose(rows, max_tokens)
            if not self._are_fit(drafts, room, max_tokens):
                drafts = dict(self._fit_parts(drafts, room, max_tokens))
        except Exception as failure:  # noqa: BLE001 - it is logged
            self._note_failure(failure)
            return NO_DRAFTS
        self._num_failures_in_a_row = 0
        return drafts

    def _are_fit(self, drafts: Drafts, room: Mapping[RequestId, int], max_tokens: int) -> bool:
        num_tokens = sum(map(len, drafts.values()))
        return num_tokens <= max_tokens and all(
            0 < len(draft) <= room.get(request_id, 0)
            and min(draft) >= 0
            and max(draft) < self._vocab_size
            for request_id, draft in drafts.items()
        )

    def _fit_parts(
        self, drafts: Drafts, room: Mapping[RequestId, int], max_tokens: int
    ) -> Iterator[tuple[RequestId, Sequence[int]]]:
        """Yield the first tokens of drafts that rows have room for and the model knows."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the proposer of %r drafts for other requests than it was asked for, no or too "
                "many tokens, or tokens that the vocabulary of %d does not have: they are left out",
                self.speculation.method,
                self._vocab_size,
            )
        for request_id, draft in drafts.items():
            length = min(room.get(request_id, 0), max_tokens)
            known = takewhile(lambda token: 0 <= token < self._vocab_size, draft)
            if fit := list(islice(known, length)):
                max_tokens -= len(fit)
                yield request_id, fit

    def _note_failure(self, failure: Exception) -> None:
        if self._has_failed:
            return
        self._num_failures_in_a_row += 1
        is_last = self._num_failures_in_a_row == MAX_FAILURES_IN_A_ROW
        log.error(
            "the proposer of %r fails: %s",
            self.speculation.method,
            "this node drafts no more" if is_last else "this step has no drafts",
            exc_info=failure,
        )

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
