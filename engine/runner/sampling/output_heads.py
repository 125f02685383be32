"""Output heads, which turn the hidden states of a pass into results: sampling, prompt logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.logprobs import TokenLogprobs
from baton.core.output import Failure
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.input_batch import Step
from baton.engine.runner.layout import TokenRun
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.sampler import NOT_FINITE, Choice, Sampler
from baton.engine.runner.sampling.spec_decode import accepted_indices

# Rows of logits for prompt logprobs that are in memory at once, whatever the chunk's length.
LOGITS_CHUNK_ROWS = 128


class HiddenStates(NamedTuple):
    """Hidden states of a pass, normalised, in the order of its runs."""

    sampled: Tensor  # [sampled runs, hidden_size], of the last token of each
    by_token: Tensor | None = None  # [tokens, hidden_size], if a head needs all of them


class OutputHead(Protocol):
    """Turns the hidden states of a pass into results of its rows.

    A pass can fail at any point and is then repeated: state that outlives it changes in `commit`.
    """

    def drop_rows(self, plan: Plan) -> None:
        """Forget the rows that leave the batch. A retry adds some of them again."""
        ...

    def needs_all_tokens(self, step: Step) -> bool:
        """Return whether hidden states of more than the sampled tokens are needed."""
        ...

    def collect(self, step: Step, hidden_states: HiddenStates, result: RunResult) -> None:
        """Add the results of this head's rows."""
        ...

    def commit(self) -> None:
        """Keep the state of the collected pass: all heads have added their results."""
        ...


class SamplingHead:
    """Samples the next tokens of rows whose scheduled tokens reach their last known one."""

    def __init__(self, decoder: Decoder, sampler: Sampler, vocab_size: int) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._grammar_masks = GrammarMasks(vocab_size)

    def drop_rows(self, plan: Plan) -> None:
        self._grammar_masks.forget(plan.dropped)

    def needs_all_tokens(self, step: Step) -> bool:
        return False

    def collect(self, step: Step, hidden_states: HiddenStates, result: RunResult) -> None:
        if not step.sampled:
            return
        logits = self._decoder.logits(hidden_states.sampled)
        runs = [step.runs[index] for index in step.sampled]
        runs = self._grammar_masks.apply_masks(runs, result.failures)
        choices = self._sampler.choose(logits, runs)
        accepted = accepted_indices(runs, choices, step.drafts)
        _add_logprobs(logits, runs, choices, accepted, result)
        for index in accepted:
            request_id, choice = runs[index].row.request_id, choices[index]
            if request_id in result.failures:
                continue
            if isinstance(choice, Failure):
                result.failures[request_id] = choice
            else:
                result.token_ids.setdefault(request_id, []).append(choice)

    def commit(self) -> None:
        """Do nothing: a row's matcher consumes its outputs when it is sampled the next time."""


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
        self._next.clear()  # a failed pass left them: its retry reports them
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


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Compute logprobs of chosen and top tokens from raw logits, [rows, vocab_size] in float32.

    The rank of a token is one plus the number of tokens with a higher logprob.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen_ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)[:, None]
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    max_tops = min(max(num_tops, default=0), logits.shape[1])
    top_values, top_ids = logprobs.topk(max_tops, dim=-1)
    columns = (token_ids, chosen.flatten().tolist(), ranks.tolist())
    tops = zip(num_tops, top_ids.tolist(), top_values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, (num, ids, values) in zip(*columns, tops, strict=True)
    ]


def _add_logprobs(
    logits: Tensor,
    runs: Sequence[TokenRun],
    choices: list[Choice],
    accepted: Sequence[int],
    result: RunResult,
) -> None:
    requested = [(i, choices[i]) for i in accepted if runs[i].row.sampling.logprobs is not None]
    chosen = [(i, choice) for i, choice in requested if not isinstance(choice, Failure)]
    if not chosen:
        return
    indices = [index for index, _ in chosen]
    num_tops = [runs[index].row.sampling.logprobs or 0 for index in indices]
    found = token_logprobs(logits[indices], [token for _, token in chosen], num_tops)
    for index, logprobs in zip(indices, found, strict=True):
        result.logprobs.setdefault(runs[index].row.request_id, []).append(logprobs)
