"""Speculative decoding in the runner: proposes drafts and accepts sampled tokens.

A drafted token is computed in the same step as the token before it. The token after it is sampled
as usual, with the random numbers of its seed and position. A sampled token is accepted if all
drafted tokens before it equal the tokens sampled at their positions. So the output is the same as
without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.ids import RequestId
from baton.core.output import Failure
from baton.engine.plan import PlanRow, RunResult
from baton.engine.runner.input_batch import Drafts, PersistentBatch, TokenRun
from baton.engine.runner.layout import Ints
from baton.engine.runner.sampling.sampler import Choice
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.drafter import Drafter


class SpecDecoder:
    def __init__(self, batch: PersistentBatch, speculation: Speculation) -> None:
        self._batch = batch
        self._speculation = speculation
        self._drafter = Drafter(speculation)

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        self._drafter.forget(request_ids)

    def drafts(
        self, num_scheduled_tokens: Mapping[RequestId, int], max_draft_tokens: int
    ) -> Drafts:
        """Propose drafts for decoding rows, within the token budget and `max_rows` of the step.

        Up to `max_rows` rows, a step takes about as long as without drafts.
        """
        num_rows_left = self._speculation.max_rows - sum(num_scheduled_tokens.values())
        num_left = min(num_rows_left, max_draft_tokens)
        drafts: dict[RequestId, Sequence[int]] = {}
        if num_left <= 0:
            return drafts
        for row in self._batch.decoding(num_scheduled_tokens):
            if row.sampling.structured_outputs is not None:
                continue  # a matcher cannot go back after a rejected draft
            room = self._batch.max_draft_len(row)
            max_tokens = min(num_left, self._speculation.num_tokens, room)
            draft = self._draft(row, max_tokens) if max_tokens > 0 else []
            if draft:
                drafts[row.request_id] = draft
                num_left -= len(draft)
            if not num_left:
                break
        return drafts

    def report_acceptance(self, drafts: Drafts, result: RunResult) -> None:
        """Report the numbers of proposed and accepted tokens to the drafter and the result."""
        for request_id, draft in drafts.items():
            num_accepted = max(0, len(result.token_ids.get(request_id, ())) - 1)
            self._drafter.note_accepted(request_id, len(draft), num_accepted)
            result.num_proposed[request_id] = len(draft)

    def _draft(self, row: PlanRow, max_tokens: int) -> list[int]:
        known: Ints = self._batch.known_tokens(row.request_id)
        return self._drafter.draft(
            row.request_id, lambda first, count: known[first : first + count].tolist(), max_tokens
        )


def accepted_indices(
    runs: Sequence[TokenRun], choices: Sequence[Choice], drafts: Drafts
) -> Sequence[int]:
    """Return the indices of the accepted choices. The runs of a request are in token order."""
    if not drafts:
        return range(len(runs))
    accepted: list[int] = []
    num_accepted: dict[RequestId, int] = {}
    ended: set[RequestId] = set()
    for index, (run, choice) in enumerate(zip(runs, choices, strict=True)):
        request_id = run.row.request_id
        if request_id in ended:
            continue
        draft, num_before = drafts.get(request_id, ()), num_accepted.get(request_id, 0)
        if isinstance(choice, Failure) and num_before:
            ended.add(request_id)  # keep the tokens before it; the next step fails again
            continue
        accepted.append(index)
        num_accepted[request_id] = num_before + 1
        if num_before == len(draft) or draft[num_before] != choice:
            ended.add(request_id)
    return accepted
