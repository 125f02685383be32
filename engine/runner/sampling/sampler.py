"""Sampler: turns logits into tokens. Each row depends only on its own parameters.

The order is that of vLLM V1, except that raw logprobs are taken before the grammar mask: raw
logprobs, grammar mask, allowed and banned tokens, min_tokens, logit bias, penalties, custom
logits processors. Greedy rows end here. Random rows go on with temperature, min-p, top-k and top-p
(renormalised after each), and the draw. Processed logprobs are those of what is drawn from.

The parameters of a step are put into its inputs before it is launched, and its results come back
in one copy. Only custom logits processors read from the device in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.core.output import RAW_LOGPROBS, Failure, FailureCause, TokenLogprobs
from baton.engine.runner.device.device import CPU, Device
from baton.engine.runner.device.step_inputs import Array, StepInputs
from baton.engine.runner.device.step_memory import Memory, StepMemory
from baton.engine.runner.device.step_outputs import Received, make_outputs
from baton.engine.runner.model.ops import Ops, Peaks
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.logits_processors import NEVER, NO_PROCESSORS, Processors
from baton.engine.runner.sampling.logprobs import PackedPeaks, read_logprobs
from baton.engine.runner.sampling.sampling import SampledRows, SamplingPass
from baton.engine.runner.sampling.torch_sampling import TORCH_SAMPLING, Draw, SamplingBackend

TORCH = Ops()
ALL_TOKENS_FORBIDDEN = "no token may be chosen: the allowed, banned and stop tokens leave none"
GRAMMAR_TOKENS_FORBIDDEN = (
    "no token may be chosen: all tokens that the grammar allows are banned or not allowed"
)
NOT_FINITE = "the model's logits are not finite"


Choice = int | Failure  # a row's token, or the reason why it has none


class Samples(NamedTuple):
    """Samples of a step, by row."""

    choices: list[Choice]
    logprobs: dict[int, TokenLogprobs]  # of the rows that request them, if they have a token


class SampledStep(NamedTuple):
    """Rows of a step, and their parameters on the device."""

    runs: Sequence[TokenRun]
    sampling: SamplingPass | None  # None: each token is that of the largest logit
    logprobs: _RequestedLogprobs | None
    processed: ProcessedLogits | None  # None: logprobs are those of the raw logits


class LaunchedSamples(NamedTuple):
    """Samples on their way to the host."""

    step: SampledStep
    token_ids: Tensor  # of the rows, on the device
    failures: dict[int, str]  # of logits processors, by row
    is_constrained: bool
    peaks: PackedPeaks | None  # which come first, if they were sent as they are
    received: Received

    def read(self) -> tuple[Array, Array, list[Array]]:
        """Return the tokens, whether logits were finite, and the other results."""
        first, *others = self.received.read()
        if self.peaks is not None:
            return *self.peaks.read(first, len(self.step.runs)), others
        return first, others.pop(0), others


class Sampler:
    """Samples a step in three parts: before its pass, after it, and once results are needed."""

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        processors: Processors = NO_PROCESSORS,
        find_peaks: Callable[[Tensor], Peaks] = TORCH.find_peaks,
        sampling: SamplingBackend = TORCH_SAMPLING,
        device: Device = CPU,
        logprobs_mode: str = RAW_LOGPROBS,
    ) -> None:
        self._logprobs_mode = logprobs_mode
        self._eos_token_ids = eos_token_ids
        self._processors = processors
        self._find_peaks = find_peaks
        self._sampling = sampling
        self._place = device.torch_device
        self._outputs = make_outputs(device)
        self._memory = StepMemory()

    def begin(self, runs: Sequence[TokenRun], vocab_size: int, inputs: StepInputs) -> SampledStep:
        """Put the parameters of the rows."""
        sampling = None
        if not all(run.allowed is None and run.row.sampling.takes_peaks for run in runs):
            rows = SampledRows(
                runs, self._eos_token_ids, vocab_size, self._place, self._find_peaks, self._memory
            )
            sampling = self._sampling.begin(rows, inputs)
        is_raw = self._logprobs_mode == RAW_LOGPROBS
        processed = None if is_raw else ProcessedLogits.of(runs, vocab_size, inputs)
        return SampledStep(runs, sampling, _RequestedLogprobs.of(runs, inputs), processed)

    def launch(
        self, step: SampledStep, logits: Tensor, peaks: PackedPeaks | None = None
    ) -> LaunchedSamples:
        """Choose a token for each row of `logits`, [rows, vocab_size] in float32, not modified.

        `peaks` are those of the logits, if they were found before. They are overwritten.
        """
        if peaks is None:
            token_ids, are_finite = self._find_peaks(logits)
        else:
            token_ids, are_finite = peaks.first_rows(len(step.runs))
        sampling = step.sampling
        scores = logits if sampling is None else sampling.constrain(logits)
        is_constrained, failures = scores is not logits, {}
        chosen = [token_ids, are_finite]
        if sampling is not None and is_constrained:
            failures = self._apply_processors(scores, step.runs, are_finite)
            token_ids, are_empty = sampling.choose(scores)
            chosen = [token_ids, are_finite, are_empty]
            peaks = None
        elif peaks is not None:
            chosen = [peaks.packed]
        measured = logits if step.processed is None else step.processed.compute(scores)
        if sampling is not None:
            sampling.draw(scores, token_ids)
        requested: Sequence[Tensor] = ()
        if step.logprobs is not None:
            requested = step.logprobs.compute(measured, token_ids, self._sampling, self._memory)
        received = self._outputs.send([*chosen, *requested])
        return LaunchedSamples(step, token_ids, failures, is_constrained, peaks, received)

    def read(self, launched: LaunchedSamples) -> Samples:
        """Wait for the samples of a step, and return them."""
        runs, failures = launched.step.runs, launched.failures
        drawn, is_finite, others = launched.read()
        is_empty = others.pop(0) if launched.is_constrained else np.zeros_like(is_finite)
        columns = runs, drawn.tolist(), is_finite.tolist(), is_empty.tolist()
        choices = [
            _choice(run, token_id, finite, empty, failures.get(index))
            for index, (run, token_id, finite, empty) in enumerate(zip(*columns, strict=True))
        ]
        logprobs = launched.step.logprobs
        return Samples(choices, {} if logprobs is None else logprobs.read(others))

    def _apply_processors(
        self, scores: Tensor, runs: Sequence[TokenRun], are_finite: Tensor
    ) -> dict[int, str]:
        """Apply custom logits processors to finite rows. Returns reasons of failures by row.

        Their code runs on the host, and its checks wait for the device.
        """
        custom = [index for index, run in enumerate(runs) if run.row.sampling.extra_args]
        if not custom:
            return {}
        failures = {}
        is_finite = are_finite.tolist()
        for index in custom:
            row, known = runs[index].row, runs[index].known_tokens
            if not is_finite[index]:
                continue
            failure = self._processors.apply(
                scores[index], known, row.num_prompt_tokens, row.sampling.extra_args
            )
            if failure:
                failures[index] = failure
                scores[index].fill_(NEVER)
        return failures


class _RequestedLogprobs(NamedTuple):
    """Rows that request logprobs, and their numbers of top tokens."""

    indices: list[int]
    num_tops: list[int]
    rows: Tensor | None  # None: all rows of the step

    @classmethod
    def of(cls, runs: Sequence[TokenRun], inputs: StepInputs) -> _RequestedLogprobs | None:
        indices = [i for i, run in enumerate(runs) if run.row.sampling.logprobs is not None]
        if not indices:
            return None
        num_tops = [runs[index].row.sampling.logprobs or 0 for index in indices]
        is_all = len(indices) == len(runs)
        rows = None if is_all else inputs.put(np.array(indices, dtype=np.int64))
        return cls(indices, num_tops, rows)

    def compute(
        self, logits: Tensor, token_ids: Tensor, sampling: SamplingBackend, memory: Memory
    ) -> Sequence[Tensor]:
        return sampling.compute_logprobs(logits, token_ids, max(self.num_tops), self.rows, memory)

    def read(self, arrays: Sequence[Array]) -> dict[int, TokenLogprobs]:
        return dict(zip(self.indices, read_logprobs(arrays, self.num_tops), strict=True))


def _choice(
    run: TokenRun, token_id: int, is_finite: bool, is_empty: bool, failure: str | None
) -> Choice:
    """Return a row's token or report its failure. `failure`: of a logits processor."""
    if not is_finite:
        return Failure(NOT_FINITE)
    if not is_empty:
        return token_id
    if failure is not None:
        return Failure(failure)
    reason = ALL_TOKENS_FORBIDDEN if run.allowed is None else GRAMMAR_TOKENS_FORBIDDEN
    return Failure(reason, FailureCause.REQUEST)


class ProcessedLogits(NamedTuple):
    """Filters of a step's random rows, over the whole vocabulary.

    Greedy rows have the constrained logits, as in vLLM. Random rows also have their temperature,
    min-p, top-k and top-p; tokens that cannot be drawn have -inf.
    """

    draw: Draw | None

    @classmethod
    def of(
        cls, runs: Sequence[TokenRun], vocab_size: int, inputs: StepInputs
    ) -> ProcessedLogits | None:
        """Put the parameters. Returns None if no row requests logprobs."""
        if all(run.row.sampling.logprobs is None for run in runs):
            return None
        indices = [
            index
            for index, run in enumerate(runs)
            if run.row.sampling.logprobs is not None and not run.row.sampling.is_greedy
        ]
        return cls(Draw.of(vocab_size, indices, runs, inputs) if indices else None)

    def compute(self, scores: Tensor) -> Tensor:
        """Return processed rows of constrained logits, which are not modified."""
        if self.draw is None:
            return scores
        filtered = self.draw.filter(scores)
        if self.draw.rows is None:
            return filtered
        processed = scores.clone()
        processed[self.draw.rows] = filtered
        return processed
