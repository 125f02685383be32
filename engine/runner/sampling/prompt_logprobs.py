"""Output head of prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.output import Failure, TokenLogprobs
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.device.device import CPU, Device
from baton.engine.runner.device.step_inputs import Array, StepInputs
from baton.engine.runner.device.step_outputs import Received, make_outputs
from baton.engine.runner.model.decoder import CausalLm
from baton.engine.runner.model.pass_layout import Ints
from baton.engine.runner.sampling.logprobs import LogprobTensors, read_logprobs
from baton.engine.runner.sampling.output_heads import HeadPass, HiddenStates
from baton.engine.runner.sampling.sampler import NOT_FINITE
from baton.engine.runner.sampling.torch_sampling import TORCH_SAMPLING, SamplingBackend

# Rows of logits that are in memory at once, whatever the chunk's length.
LOGITS_CHUNK_ROWS = 128


class PromptLogprobs:
    """Output head that computes prompt logprobs.

    The last hidden state of a chunk predicts the first token of the next chunk, so each chunk
    carries one logprob over to the next.
    """

    def __init__(
        self, decoder: CausalLm, device: Device = CPU, sampling: SamplingBackend = TORCH_SAMPLING
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

    @property
    def sampled(self) -> None:
        """Return None: what this pass carries over is kept when it is collected."""

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
