"""Logprobs of the prompt's own tokens, as its chunks go through."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.plan import RunResult
from engine.request import RequestId
from engine.runner.batch import PersistentBatch, RowFacts, Step
from engine.runner.logprobs import token_logprobs
from engine.runner.model import Decoder
from engine.runner.sampler import NOT_FINITE
from kv_transfer.types import TokenLogprobs

# So many rows of logits are held at once, whatever the chunk's length.
ROWS_AT_ONCE = 128


class PromptLogprobs:
    """A chunk's last state foretells the next chunk's first token, so one is carried over."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._carried: dict[RequestId, TokenLogprobs] = {}
        self._next: dict[RequestId, TokenLogprobs] = {}  # carried from the pass under way
        self._done: list[RequestId] = []  # told in the pass under way

    def begin_pass(self) -> None:
        """What a pass that failed has told is told by its retry."""
        self._next.clear()
        self._done.clear()

    def end_pass(self) -> None:
        for request_id in self._done:
            self._carried.pop(request_id, None)
        self._carried |= self._next

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._carried.pop(request_id, None)

    def are_asked(self, step: Step) -> bool:
        """Whether states of more than the last tokens are needed."""
        return any(run.row.wants_prompt_logprobs for run in step.runs)

    def answer(self, step: Step, states: Tensor, batch: PersistentBatch, result: RunResult) -> None:
        """One entry for each prompt token of this step; the first of a prompt has none."""
        first = 0
        for row, num_tokens, end in step.runs:
            start = end - num_tokens
            if row.wants_prompt_logprobs and start < row.num_prompt_tokens:
                self._answer_row(row, start, states[first : first + num_tokens], batch, result)
            first += num_tokens

    def _answer_row(
        self, row: RowFacts, start: int, states: Tensor, batch: PersistentBatch, result: RunResult
    ) -> None:
        end = min(start + len(states) + 1, row.num_prompt_tokens)
        known = batch.known_tokens(row)[start + 1 : end]
        foretold: list[TokenLogprobs] = []
        for rows in range(0, len(known), ROWS_AT_ONCE):
            targets = known[rows : rows + ROWS_AT_ONCE]
            logits = self._decoder.logits(states[rows : rows + len(targets)])
            if not torch.isfinite(logits).all():
                result.errors[row.request_id] = NOT_FINITE
                return
            num_tops = [row.sampling.prompt_logprobs or 0] * len(targets)
            foretold += token_logprobs(logits, targets.tolist(), num_tops)
        entries = [self._carried.get(row.request_id), *foretold]
        self._done.append(row.request_id)
        if len(foretold) == len(states):  # the last one is of a token of the next chunk
            self._next[row.request_id] = foretold[-1]
            entries.pop()
        result.prompt_logprobs[row.request_id] = entries
