"""Output heads, which turn the hidden states of a pass into results: sampling, prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.logprobs import TokenLogprobs
from baton.core.output import Failure
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.device.device import CPU, Device
from baton.engine.runner.device.step_inputs import Array, StepInputs, make_inputs
from baton.engine.runner.device.step_outputs import Received, make_outputs
from baton.engine.runner.input_batch import Step
from baton.engine.runner.layout import Ints, TokenRun
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.logprobs import LogprobTensors, read_logprobs
from baton.engine.runner.sampling.packed_peaks import PackedPeaks
from baton.engine.runner.sampling.sampler import (
    NOT_FINITE,
    LaunchedSamples,
    SampledStep,
    Sampler,
)
from baton.engine.runner.sampling.sampling import Sampling
from baton.engine.runner.sampling.spec_decode import accepted_indices
from baton.engine.runner.sampling.torch_sampling import TORCH_SAMPLING
from baton.engine.spec_decode.proposer import Drafts

# Rows of logits for prompt logprobs that are in memory at once, whatever the chunk's length.
LOGITS_CHUNK_ROWS = 128


class HiddenStates(NamedTuple):
    """Hidden states of a pass, normalised, in the order of its runs."""

    sampled: Tensor  # [sampled runs, hidden_size], of the last token of each
    by_token: Tensor | None = None  # [tokens, hidden_size], if a head needs all of them
    # Of the sampled tokens, if they are computed with the pass. The next pass overwrites them.
    logits: Tensor | None = None
    peaks: PackedPeaks | None = None

    def first_rows(self, num_rows: int) -> HiddenStates:
        """Return these results of a padded pass without those of padding rows."""
        logits = None if self.logits is None else self.logits[:num_rows]
        return self._replace(sampled=self.sampled[:num_rows], logits=logits)

    def select(self, rows: Tensor) -> HiddenStates:
        """Return the results of these sampled tokens."""
        return HiddenStates(self.sampled[rows], self.by_token)


class HeadPass(Protocol):
    """Work of an output head in one pass."""

    def launch(self, hidden_states: HiddenStates) -> None:
        """Launch what turns hidden states into results."""
        ...

    def collect(self, result: RunResult) -> None:
        """Wait for the results of this head's rows, and add them."""
        ...

    def commit(self) -> None:
        """Keep the state of the collected pass: all heads have added their results."""
        ...


class OutputHead(Protocol):
    """Turns the hidden states of a pass into results of its rows.

    A pass can fail at any point and is then repeated: state that outlives it changes in the
    `commit` of its pass.
    """

    def drop_rows(self, plan: Plan) -> None:
        """Forget the rows that leave the batch. A retry adds some of them again."""
        ...

    def needs_all_tokens(self, step: Step) -> bool:
        """Return whether hidden states of more than the sampled tokens are needed."""
        ...

    def begin(self, step: Step, inputs: StepInputs) -> HeadPass | None:
        """Put the arrays of a step. Returns None if no row of it concerns this head."""
        ...


class SamplingHead:
    """Samples the next tokens of rows whose scheduled tokens reach their last known one."""

    def __init__(
        self, decoder: Decoder, sampler: Sampler, vocab_size: int, device: Device = CPU
    ) -> None:
        self.decoder = decoder
        self.sampler = sampler
        self.vocab_size = vocab_size
        self.grammar_masks = GrammarMasks(vocab_size)
        self._device = device

    @cached_property
    def late_inputs(self) -> StepInputs:
        """Inputs for steps with grammars, whose memory is taken by the first of them."""
        return make_inputs(self._device)

    def drop_rows(self, plan: Plan) -> None:
        self.grammar_masks.forget(plan.dropped)

    def needs_all_tokens(self, step: Step) -> bool:
        return False

    def begin(self, step: Step, inputs: StepInputs) -> HeadPass | None:
        runs = [step.runs[index] for index in step.sampled]
        places = [place for place, run in enumerate(runs) if not run.row.is_pooled]
        if not places:
            return None
        rows = None
        if len(places) < len(runs):
            runs = [runs[place] for place in places]
            rows = inputs.put(np.array(places, dtype=np.int64))
        has_grammar = any(run.row.grammar is not None for run in runs)
        sampled = None if has_grammar else self.sampler.begin(runs, self.vocab_size, inputs)
        return _SampledPass(self, step.drafts, runs, sampled, rows)


@dataclass(slots=True, eq=False)
class _SampledPass:
    """Implements `HeadPass`."""

    head: SamplingHead
    drafts: Drafts
    runs: list[TokenRun]
    sampled: SampledStep | None  # None: masks of grammars are missing
    rows: Tensor | None  # of the hidden states; None: all
    failures: dict[RequestId, Failure] = field(default_factory=dict)
    launched: LaunchedSamples | None = None

    def launch(self, hidden_states: HiddenStates) -> None:
        head, sampled = self.head, self.sampled
        if self.rows is not None:
            hidden_states = hidden_states.select(self.rows)
        logits = hidden_states.logits
        if logits is None:
            logits = head.decoder.logits(hidden_states.sampled)
        if sampled is None:
            sampled = self._begin_late()
        self.launched = head.sampler.launch(sampled, logits, hidden_states.peaks)

    def _begin_late(self) -> SampledStep:
        """Fill the masks of grammars while the device computes, and put them into a copy apart."""
        head, inputs = self.head, self.head.late_inputs
        self.runs = head.grammar_masks.apply_masks(self.runs, self.failures)
        inputs.begin()
        sampled = head.sampler.begin(self.runs, head.vocab_size, inputs)
        inputs.send()
        return sampled

    def collect(self, result: RunResult) -> None:
        if self.launched is None:
            return
        choices, logprobs = self.head.sampler.read(self.launched)
        result.failures.update(self.failures)
        for index in accepted_indices(self.runs, choices, self.drafts):
            request_id, choice = self.runs[index].row.request_id, choices[index]
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

    def __init__(
        self, decoder: Decoder, device: Device = CPU, sampling: Sampling = TORCH_SAMPLING
    ) -> None:
        self.decoder = decoder
        self.sampling = sampling
        self.outputs = make_outputs(device)
        self.carried: dict[RequestId, TokenLogprobs] = {}

    def drop_rows(self, plan: Plan) -> None:
        if plan.is_retry:
            return  # rows dropped by a failed pass are added again
        for request_id in plan.dropped:
            self.carried.pop(request_id, None)

    def needs_all_tokens(self, step: Step) -> bool:
        return any(run.row.wants_prompt_logprobs for run in step.runs)

    def begin(self, step: Step, inputs: StepInputs) -> HeadPass | None:
        parts = list(_prompt_parts(step))
        if not parts:
            return None
        return _PredictedPrompts(self, parts, [inputs.put(part.targets) for part in parts])


@dataclass(slots=True, eq=False)
class _PredictedPrompts:
    """Implements `HeadPass`. Targets and results are copied together."""

    head: PromptLogprobs
    parts: Sequence[_PromptPart]
    targets: Sequence[Tensor]
    received: Received | None = None
    reported: list[RequestId] = field(default_factory=list)
    carried: dict[RequestId, TokenLogprobs] = field(default_factory=dict)  # out of this pass

    def launch(self, hidden_states: HiddenStates) -> None:
        by_token = hidden_states.by_token
        if by_token is None:
            return
        tensors: list[Tensor] = []
        for part, token_ids in zip(self.parts, self.targets, strict=True):
            own = by_token[part.first : part.first + len(part.targets)]
            for chunk in range(0, len(part.targets), LOGITS_CHUNK_ROWS):
                rows = slice(chunk, chunk + LOGITS_CHUNK_ROWS)
                logits = self.head.decoder.logits(own[rows])
                num_tops = part.row.sampling.prompt_logprobs or 0
                tensors += (
                    logits.isfinite().all(),
                    *self.head.sampling.compute_logprobs(logits, token_ids[rows], num_tops),
                )
        self.received = self.head.outputs.send(tensors)

    def collect(self, result: RunResult) -> None:
        if self.received is None:
            return
        arrays = iter(self.received.read())
        for part in self.parts:
            predicted = part.read(arrays)
            if predicted is None:  # a logit is not finite
                result.failures[part.row.request_id] = Failure(NOT_FINITE)
            else:
                self._add(part, predicted, result)

    def commit(self) -> None:
        for request_id in self.reported:
            self.head.carried.pop(request_id, None)
        self.head.carried |= self.carried

    def _add(self, part: _PromptPart, predicted: list[TokenLogprobs], result: RunResult) -> None:
        """Add one entry for each prompt token of this step; a prompt's first token has None."""
        request_id = part.row.request_id
        entries = [self.head.carried.get(request_id), *predicted]
        self.reported.append(request_id)
        if len(predicted) == part.num_tokens:  # the last one is of the next chunk's first token
            self.carried[request_id] = predicted[-1]
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
