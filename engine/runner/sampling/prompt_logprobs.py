"""Logprobs of prompt tokens, computed chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.logprobs import TokenLogprobs
from baton.core.output import Failure
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.input_batch import Step
from baton.engine.runner.layout import TokenRun
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.sampling.logprobs import token_logprobs
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.sampling.sampler import NOT_FINITE

# Rows of logits held in memory at once, whatever the chunk's length.
LOGITS_CHUNK_ROWS = 128


class PromptLogprobs:
    """Output head that computes prompt logprobs.

    The last hidden state of a chunk predicts the first token of the next chunk, so each chunk
    carries one logprob over to the next.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._carried: dict[RequestId, TokenLogprobs] = {}
        self._next: dict[RequestId, TokenLogprobs] = {}  # carried out of the current pass
        self._done: list[RequestId] = []  # reported in the current pass

    def drop_rows(self, plan: Plan) -> None:
        if plan.is_retry:
            return  # rows dropped by a failed pass are added again
        for request_id in plan.dropped:
            self._carried.pop(request_id, None)

    def needs_all_tokens(self, step: Step) -> bool:
        return any(run.row.wants_prompt_logprobs for run in step.runs)

    def collect(self, step: Step, hidden_states: HiddenStates, result: RunResult) -> None:
        """Add one entry for each prompt token of this step; a prompt's first token has None."""
        self._next.clear()  # of a failed pass: its retry reports them
        self._done.clear()
        by_token = hidden_states.by_token
        if by_token is None:
            return
        first = 0
        for run in step.runs:
            is_prompt = run.end - run.num_tokens < run.row.num_prompt_tokens
            if run.row.wants_prompt_logprobs and is_prompt:
                self._add_run(run, by_token[first : first + run.num_tokens], result)
            first += run.num_tokens

    def commit(self) -> None:
        for request_id in self._done:
            self._carried.pop(request_id, None)
        self._carried |= self._next

    def _add_run(self, run: TokenRun, hidden_states: Tensor, result: RunResult) -> None:
        row, start = run.row, run.end - run.num_tokens
        known = row.token_ids[start + 1 : run.end + 1]
        predicted: list[TokenLogprobs] = []
        for rows in range(0, len(known), LOGITS_CHUNK_ROWS):
            targets = known[rows : rows + LOGITS_CHUNK_ROWS]
            logits = self._decoder.logits(hidden_states[rows : rows + len(targets)])
            if not torch.isfinite(logits).all():
                result.failures[row.request_id] = Failure(NOT_FINITE)
                return
            num_tops = [row.sampling.prompt_logprobs or 0] * len(targets)
            predicted += token_logprobs(logits, targets, num_tops)
        entries = [self._carried.get(row.request_id), *predicted]
        self._done.append(row.request_id)
        if len(predicted) == len(hidden_states):  # the last one is of the next chunk's first token
            self._next[row.request_id] = predicted[-1]
            entries.pop()
        result.prompt_logprobs[row.request_id] = entries
