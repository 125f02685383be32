"""Output heads, which turn the hidden states of a pass into results: sampling, prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.logprobs import TokenLogprobs
from baton.core.output import Failure
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, Array, StepInputs
from baton.engine.runner.device.step_outputs import to_host
from baton.engine.runner.input_batch import Step
from baton.engine.runner.layout import Ints
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.logprobs import (
    LogprobTensors,
    compute_logprobs,
    read_logprobs,
)
from baton.engine.runner.sampling.sampler import NOT_FINITE, Sampler
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
        choices, logprobs = self._sampler.sample(logits, runs)
        for index in accepted_indices(runs, choices, step.drafts):
            request_id, choice = runs[index].row.request_id, choices[index]
            if index in logprobs and not isinstance(choice, Failure):
                result.logprobs.setdefault(request_id, []).append(logprobs[index])
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

    def __init__(self, decoder: Decoder, inputs: StepInputs = SHARED_INPUTS) -> None:
        self._decoder = decoder
        self._inputs = inputs
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
        if hidden_states.by_token is None:
            return
        parts = list(_prompt_parts(step))
        for part, predicted in zip(
            parts, self._predict(parts, hidden_states.by_token), strict=True
        ):
            if predicted is None:
                result.failures[part.row.request_id] = Failure(NOT_FINITE)
            else:
                self._add(part, predicted, result)

    def commit(self) -> None:
        for request_id in self._done:
            self._carried.pop(request_id, None)
        self._carried |= self._next

    def _predict(
        self, parts: Sequence[_PromptPart], by_token: Tensor
    ) -> Iterator[list[TokenLogprobs] | None]:
        """Yield the logprobs of each part's targets, or None if a logit is not finite.

        Targets and results are copied to and from the device together.
        """
        self._inputs.begin()
        targets = [self._inputs.put(part.targets) for part in parts]
        self._inputs.send()
        tensors: list[Tensor] = []
        for part, token_ids in zip(parts, targets, strict=True):
            hidden_states = by_token[part.first : part.first + len(part.targets)]
            for chunk in range(0, len(part.targets), LOGITS_CHUNK_ROWS):
                rows = slice(chunk, chunk + LOGITS_CHUNK_ROWS)
                logits = self._decoder.logits(hidden_states[rows])
                num_tops = part.row.sampling.prompt_logprobs or 0
                tensors += (
                    logits.isfinite().all(),
                    *compute_logprobs(logits, token_ids[rows], num_tops),
                )
        arrays = iter(to_host(tensors))
        for part in parts:
            yield part.read(arrays)

    def _add(self, part: _PromptPart, predicted: list[TokenLogprobs], result: RunResult) -> None:
        request_id = part.row.request_id
        entries = [self._carried.get(request_id), *predicted]
        self._done.append(request_id)
        if len(predicted) == part.num_tokens:  # the last one is of the next chunk's first token
            self._next[request_id] = predicted[-1]
            entries.pop()
        result.prompt_logprobs[request_id] = entries


class _PromptPart(NamedTuple):
    """Prompt tokens of a row in a step, and the tokens that follow them in the prompt."""

    row: PlanRow
    first: int  # index of the first token in the flat batch
    num_tokens: int
    targets: Ints  # one fewer at the end of the prompt

    def read(self, arrays: Iterator[Array]) -> list[TokenLogprobs] | None:
        """Read the logprobs of the targets from the results, chunk after chunk."""
        predicted: list[TokenLogprobs] = []
        is_finite = True
        for _ in range(0, len(self.targets), LOGITS_CHUNK_ROWS):
            is_finite = bool(next(arrays)) and is_finite
            columns = [next(arrays) for _ in LogprobTensors._fields]
            num_tops = [self.row.sampling.prompt_logprobs or 0] * len(columns[0])
            predicted += read_logprobs(columns, num_tops)
        return predicted if is_finite else None


def _prompt_parts(step: Step) -> Iterator[_PromptPart]:
    """Yield the runs that compute prompt tokens and request their logprobs."""
    first = 0
    for run in step.runs:
        row, start = run.row, run.end - run.num_tokens
        if row.wants_prompt_logprobs and start < row.num_prompt_tokens:
            targets = np.array(row.token_ids[start + 1 : run.end + 1], dtype=np.int64)
            yield _PromptPart(row, first, run.num_tokens, targets)
        first += run.num_tokens
