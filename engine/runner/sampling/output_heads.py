"""Output heads, which turn the hidden states of a pass into results. The first one samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.output import Failure
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.batch.unknown_tokens import SampledTokens, UnknownTokens
from baton.engine.runner.device.device import CPU, Device
from baton.engine.runner.device.step_inputs import StepInputs, make_inputs
from baton.engine.runner.model.decoder import CausalLm
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.constraints import depends_on_tokens
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.logprobs import PackedPeaks
from baton.engine.runner.sampling.sampler import Choice, LaunchedSamples, SampledStep, Sampler
from baton.engine.spec_decode.proposer import Drafts

NO_TOKEN = Failure("the pass before gave no token")  # never seen: the request has ended


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

    @property
    def sampled(self) -> SampledTokens | None:
        """Return the tokens that the launched pass samples.

        None if the results of this head must be collected before the next pass is launched.
        """
        ...

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
        self, decoder: CausalLm, sampler: Sampler, vocab_size: int, device: Device = CPU
    ) -> None:
        self.decoder = decoder
        self.sampler = sampler
        self.vocab_size = vocab_size
        self._grammar_masks: GrammarMasks | None = None
        self._device = device

    @cached_property
    def late_inputs(self) -> StepInputs:
        """Inputs for steps with grammars, or rows that need tokens on their way to the host.

        Their memory is taken by the first of these steps.
        """
        return make_inputs(self._device)

    @property
    def grammar_masks(self) -> GrammarMasks:
        """Masks of grammars, from the first row with one on."""
        if self._grammar_masks is None:
            self._grammar_masks = GrammarMasks(self.vocab_size)
        return self._grammar_masks

    def drop_rows(self, plan: Plan) -> None:
        if self._grammar_masks is not None:
            self._grammar_masks.forget(plan.dropped)

    def needs_all_tokens(self, step: Step) -> bool:
        return False

    def begin(self, step: Step, inputs: StepInputs) -> HeadPass | None:
        runs = [step.runs[index] for index in step.sampled]
        places = [place for place, run in enumerate(runs) if not run.row.task.is_pooling]
        if not places:
            return None
        rows = None
        if len(places) < len(runs):
            runs = [runs[place] for place in places]
            rows = inputs.put(np.array(places, dtype=np.int64))
        unknown = None
        if step.unknown is not None and any(depends_on_tokens(r.row) for r in step.unknown.runs):
            unknown = step.unknown
        is_late = unknown is not None or any(run.row.grammar is not None for run in runs)
        begun = None if is_late else self.sampler.begin(runs, self.vocab_size, inputs)
        return _SampledPass(self, step.drafts, runs, begun, rows, unknown)


@dataclass(slots=True, eq=False)
class _SampledPass:
    """Implements `HeadPass`."""

    head: SamplingHead
    drafts: Drafts
    runs: list[TokenRun]
    begun: SampledStep | None  # None: masks of grammars, or tokens that rows need, are missing
    rows: Tensor | None  # of the hidden states; None: all
    unknown: UnknownTokens | None  # if rows need them
    failures: dict[RequestId, Failure] = field(default_factory=dict)
    launched: LaunchedSamples | None = None

    @property
    def sampled(self) -> SampledTokens | None:
        launched = self.launched
        return None if launched is None else SampledTokens(self.runs, launched.token_ids)

    def launch(self, hidden_states: HiddenStates) -> None:
        head, begun = self.head, self.begun
        if self.rows is not None:
            hidden_states = hidden_states.select(self.rows)
        logits = hidden_states.logits
        if logits is None:
            logits = head.decoder.logits(hidden_states.sampled)
        if begun is None:
            begun = self._begin_late()
        self.launched = head.sampler.launch(begun, logits, hidden_states.peaks)

    def _begin_late(self) -> SampledStep:
        """Fill the masks of grammars while the device computes, and put them into a copy apart.

        The device already computes with the tokens that this waits for.
        """
        head, inputs = self.head, self.head.late_inputs
        if self.unknown is not None:
            failed = self.unknown.failed_rows()
            self.failures |= dict.fromkeys(failed, NO_TOKEN)  # a grammar must not read it
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
