"""Proposer by prompt lookup: the tokens that followed an earlier occurrence of the newest ones.

Each sequence has an n-gram index and a record of accepted drafts. The fewer drafts are accepted,
the fewer are made, so that failed speculation costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.core.ids import RequestId
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.ngram_index import NgramIndex
from baton.engine.spec_decode.proposer import DraftRow, Drafts

# A long prompt is indexed over several steps, since indexing it at once would delay all rows.
MAX_TOKENS_INDEXED_PER_STEP = 4096
MAX_PAUSE_STEPS = 64  # steps


class NgramProposer:
    """Implements `Proposer`."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._by_request: dict[RequestId, _SequenceDrafter] = {}

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        drafts: dict[RequestId, Sequence[int]] = {}
        for row in rows:
            draft = self._draft(row, min(row.max_tokens, max_tokens))
            if draft:
                drafts[row.request_id] = draft
                max_tokens -= len(draft)
            if not max_tokens:
                break
        return drafts

    def note_accepted(self, request_id: RequestId, num_proposed: int, num_accepted: int) -> None:
        self._by_request[request_id].note_accepted(num_proposed, num_accepted)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._by_request.pop(request_id, None)

    def _draft(self, row: DraftRow, max_tokens: int) -> list[int]:
        drafter = self._by_request.get(row.request_id)
        if drafter is None:
            drafter = self._by_request[row.request_id] = _SequenceDrafter(self._speculation)
        return drafter.draft(row.known_tokens, max_tokens)


class _SequenceDrafter:
    """Draft state of one sequence."""

    def __init__(self, speculation: Speculation) -> None:
        self._index = NgramIndex(speculation.min_ngram, speculation.max_ngram)
        self._longest = speculation.num_tokens
        self._length = speculation.num_tokens
        self._num_failures = 0  # in a row
        self._pause = 0  # steps left without drafts

    def draft(self, known_tokens: npt.NDArray[np.int64], max_tokens: int) -> list[int]:
        first = self._index.num_tokens
        new_tokens = known_tokens[first : first + MAX_TOKENS_INDEXED_PER_STEP].tolist()
        self._index.extend(new_tokens)
        if self._pause:
            self._pause -= 1
            return []
        if len(new_tokens) == MAX_TOKENS_INDEXED_PER_STEP:
            return []
        return self._index.proposal(min(max_tokens, self._length))

    def note_accepted(self, num_proposed: int, num_accepted: int) -> None:
        """Adapt the draft length to twice the accepted tokens.

        If none are accepted, pause drafting for a number of steps that doubles each time.
        """
        if num_accepted:
            self._num_failures = 0
            self._length = min(self._longest, 2 * num_accepted)
            return
        self._num_failures += 1
        self._length = 1 if self._num_failures > 1 else max(1, self._longest // 2)
        self._pause = min(MAX_PAUSE_STEPS, 2 ** (self._num_failures - 1) - 1)
